# Two commands do everything: `make run` shows Tapio at work, `make test` passes the tests.
# Each installs what it needs and says so; see scripts/setup.
.PHONY: run test
run:
	@scripts/run
test:
	@scripts/test
