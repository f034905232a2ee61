"""Checks an ed25519 signature with integers alone (RFC 8032, section 5.1.7); slow, and for tests only."""

from __future__ import annotations

import hashlib

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]


def verifies(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether 64 bytes of signature over ``message`` are those of the owner of 32 bytes of public key."""
    s = int.from_bytes(signature[32:], "little")
    hashed = hashlib.sha512(signature[:32] + public + message).digest()
    k = int.from_bytes(hashed, "little") % ORDER
    return s < ORDER and times(s, BASE) == plus(point(signature[:32]), times(k, point(public)))


def plus(a: Point, b: Point) -> Point:
    product = D * a[0] * b[0] * a[1] * b[1] % P
    x = (a[0] * b[1] + a[1] * b[0]) * pow(1 + product, -1, P)
    y = (a[1] * b[1] + a[0] * b[0]) * pow(1 - product, -1, P)
    return x % P, y % P


def times(factor: int, a: Point) -> Point:
    result = (0, 1)
    while factor:
        if factor & 1:
            result = plus(result, a)
        a, factor = plus(a, a), factor >> 1
    return result


def point(data: bytes) -> Point:
    """From y and the lowest bit of x."""
    number = int.from_bytes(data, "little")
    y, odd = number % 2**255, number >> 255
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    if x * x % P != square:
        raise ValueError("not a point of the curve")
    return (x if x & 1 == odd else P - x), y


BASE = point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
