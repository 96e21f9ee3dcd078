# shellcheck shell=dash
# Shared by both guests' first programs: reporting, and files whose sums can be compared from outside.
# Plain POSIX sh: one guest has the host's userland (hostfs), the other only busybox.
#
# The runner reads the console. It believes three kinds of line and nothing else:
#   RESULT key=value     a figure or a digest
#   FAIL text            something went wrong; the test fails with this text
#   RESULT status=ok     the last line of a run that got to its end

# The console, also where a command's output is taken.
exec 3>&1

report() { echo "RESULT $*" >&3; }

halt_guest() {
	sync
	# busybox talks to the kernel itself; halt(8) may belong to an init system that is not running here.
	busybox poweroff -f
	# Not reached unless the kernel refuses; a guest that hangs is ended by the runner's deadline.
	while :; do sleep 1; done
}

fail() {
	echo "FAIL $*" >&3
	# A guest with more to tell has a function for it.
	! type why >/dev/null 2>&1 || why
	halt_guest
}

must() { "$@" >/mnt/.out 2>&1 || fail "'$*' ended with $?: $(tr '\n' ' ' </mnt/.out | tail -c 400)"; }

# fill DIR COUNT MIB: COUNT files of MIB mebibytes of random bytes, and a few small ones.
fill() {
	index=0
	while [ "$index" -lt "$2" ]; do
		dd if=/dev/urandom of="$1/file$index" bs=1048576 count="$3" 2>/dev/null || fail "writing file$index"
		index=$((index + 1))
	done
	mkdir -p "$1/small" || fail "mkdir small"
	index=0
	while [ "$index" -lt 64 ]; do
		echo "small file $index" >"$1/small/$index" || fail "writing small/$index"
		index=$((index + 1))
	done
}

# tree_digest DIR: one digest over the names and contents of all regular files below DIR.
# crates/test/e2e/src/digest.rs computes the same from outside.
tree_digest() {
	(cd "$1" && find . -type f ! -path './lost+found/*' | LC_ALL=C sort | while read -r name; do
		sha256sum "$name"
	done | sha256sum | cut -d' ' -f1)
}

drop_caches() { echo 3 >/proc/sys/vm/drop_caches; }

seconds() { cut -d' ' -f1 /proc/uptime; }

# What the kernel found out about the disk.
describe() {
	name=$(basename "$1")
	queue=/sys/block/$name/queue
	report "sectors=$(cat "/sys/block/$name/size")"
	report "read_only=$(cat "/sys/block/$name/ro")"
	report "queues=$(ls "/sys/block/$name/mq" | wc -l)"
	report "logical_block=$(cat "$queue/logical_block_size")"
	report "write_cache=$(cat "$queue/write_cache")"
	report "discard_max=$(cat "$queue/discard_max_bytes")"
	report "write_zeroes_max=$(cat "$queue/write_zeroes_max_bytes")"
	report "features=$(cat "/sys/block/$name/device/features" 2>/dev/null)"
	report "serial=$(cat "/sys/block/$name/serial" 2>/dev/null)"
}
