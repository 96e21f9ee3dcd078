# Two commands do everything: `make run` shows Tapio at work, `make test` passes the tests.
# Each installs what it needs and says so; see scripts/setup.
# `make run-disk` shows a single disk, without the toolstack; `make run-pool` a pool of three hosts; `make deb` builds Debian packages.
.PHONY: run run-disk run-pool test deb
run:
	@scripts/run
run-disk:
	@scripts/run-disk
run-pool:
	@scripts/run-pool
test:
	@scripts/test
deb:
	@scripts/deb
