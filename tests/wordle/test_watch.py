import time

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from examples.wordle.watch import StatusWatcher


def test_version_changes_are_seen_between_two_polls(serve):
    app = FastAPI()
    started = time.time()
    asked = []

    @app.get("/delta_sync/status")
    def status():
        asked.append(1)
        if len(asked) == 3:
            return JSONResponse({"error": "busy"}, status_code=504)
        if len(asked) == 4:
            return HTMLResponse("a proxy's page")
        return {"version": None if len(asked) < 2 else int((time.time() - started) / 0.3)}

    with StatusWatcher(serve(app), period=0.02) as watcher:
        while len(watcher.commits) < 3 and time.time() < started + 30:
            time.sleep(0.05)
    assert watcher.failed_polls == 2
    assert [c.version for c in watcher.commits] == sorted({c.version for c in watcher.commits})
    assert len(watcher.commits) >= 3
    for commit in watcher.commits[1:]:
        happened = started + commit.version * 0.3
        assert commit.before <= happened + 0.001 and commit.after >= happened - 0.001
        assert commit.after - commit.before < 0.3
