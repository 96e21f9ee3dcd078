# Two commands do everything: `make run` shows Tapio at work, `make test` passes the tests.
# Each installs what it needs and says so; see scripts/setup.
# `make run-disk` shows a single disk, without the toolstack.
.PHONY: run run-disk test
run:
	@scripts/run
run-disk:
	@scripts/run-disk
test:
	@scripts/test
