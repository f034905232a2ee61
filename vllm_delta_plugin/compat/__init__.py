"""The places where vLLM is touched, one file per seam: each checks that its seam exists and names it if not."""
