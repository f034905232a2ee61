# Every target sets up what it needs; on a fresh machine `make demo` or `make test` is the only command.
PYTHON  ?= python3
VENV    ?= .venv
BACKEND ?= auto
OLDEST  ?= .venv-oldest
PY      := $(VENV)/bin/python

.PHONY: demo rehearsal test test-long test-rare test-oldest test-ui test-hub-live browser screenshots coverage-table check docs bench setup clean

setup:
	@$(PYTHON) scripts/setup_env.py $(VENV) --backend $(BACKEND)

demo: setup
	@$(PY) -m examples.wordle.demo $(ARGS)

# The two-Space run on one machine (Linux, as root): ARGS=--kill-server restarts the rollouts in between.
rehearsal: setup
	@$(PY) -m examples.wordle.rehearsal $(ARGS)

# Two processes of tests side by side; ARGS="-n 0" runs them one after the other.
test: setup
	$(PY) -m pytest -n 2 --dist loadfile -m "not long and not gpu" $(ARGS)

test-long: setup
	$(PY) -m pytest -n 2 --dist loadfile -m "long and not rare and not gpu" $(ARGS)
	$(MAKE) test-oldest

# What CI has no time for, or no rights: layouts served by two engines, stages with experts, more kinds of packed experts, most of fp8, 500 steps,
# containers, the two Spaces with a kill, a new user's session. On a quiet machine.
test-rare: setup
	$(PY) -m pytest -m "rare and not gpu" $(ARGS)

# The same tests against the oldest vLLM with a CPU build and the oldest TRL that are supported.
test-oldest:
	@$(PYTHON) scripts/setup_env.py $(OLDEST) --backend cpu --vllm 0.27.0 --trl 1.11.0
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -m "not long and not gpu" \
		tests/worker/test_worker_updates.py tests/worker/test_refused_settings.py tests/worker/test_worker_failures.py \
		tests/worker/test_worker_units.py tests/worker/test_moved.py tests/worker/test_latent_attention.py tests/engine tests/trainer/test_trainers.py tests/trainer/test_rollout_client.py \
		tests/trainer/test_rollouts_ahead.py tests/trainer/test_stale_correction.py tests/trainer/test_fleet.py \
		tests/trainer/test_weight_transfer.py

# The dashboard in a real Chromium, which is installed where it is missing and may be.
test-ui: browser
	DELTA_SYNC_BROWSER_REQUIRED=1 $(PY) -m pytest tests/cli/test_dashboard_page.py $(ARGS)

# docs/images, from a small run that it makes.
screenshots: browser
	$(PY) scripts/screenshots.py $(ARGS)

browser: setup
	@$(PY) -c "import playwright" 2>/dev/null || $(PY) -m pip install -q --disable-pip-version-check "playwright>=1.50"
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get && apt-get update -q && apt-get install -y -q chromium; } || \
		{ echo "Chromium: expected on PATH, got none. Remedy: install it, as in 'apt-get install chromium'"; exit 1; }

# The store's contract on the real Hub, in a private bucket of the account that HF_TOKEN or `hf auth login` names.
test-hub-live: setup
	DELTA_SYNC_HUB_LIVE=1 $(PY) -m pytest tests/store/test_hub_live.py -s $(ARGS)

# docs/COVERAGE.md, from the outcomes of the tests that compare with it afterwards.
coverage-table: setup
	DELTA_SYNC_WRITE_COVERAGE=1 $(PY) -m pytest tests/worker/test_families.py $(ARGS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/hadolint docker/*/Dockerfile

# The documentation as a site, build/site/index.html; a warning is an error. `make docs ARGS=serve` shows it while one writes.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs $(or $(ARGS),build --strict --quiet)

bench: setup
	$(PY) benchmarks/codec_speed.py --xet --trace tests/traces/*policy*.npz
	$(PY) benchmarks/wire_layouts.py $(ARGS)

clean:
	rm -rf $(VENV) .cache build
