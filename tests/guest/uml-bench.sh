# shellcheck shell=dash
# Benchmarks on the first disk of a guest, which has device-mapper. Sourced by uml-init.sh after uml-volumes.sh, whose
# helpers it uses.

# reported: what `tapio bench` printed, line by line.
reported() {
	number=0
	while read -r line; do
		number=$((number + 1))
		report "line$number=$line"
	done </mnt/.bench
	report "lines=$number"
}

# A disk through Tapio beside the same disk without. tapio_mib, tapio_dd: bytes of the disk, and what dd writes, in MiB.
case_device_bench() {
	volumes_here
	mkdir -p /mnt/bench
	"$tapio_bin/tapio" bench device --dir /mnt/bench --device /dev/vda --size "$mib" --dd "$tapio_dd" \
		--rounds "$tapio_rounds" --seconds "$tapio_seconds" --svg /mnt/bench.svg --json /mnt/bench.json \
		>/mnt/.bench 2>&1 || fail "$(tail -c 600 /mnt/.bench | tr '\n' ' ')"
	same "the volume groups" "$(plain vgs --noheadings -o vg_name 2>/dev/null)" ""
	grep -q "^/dev/vda " /proc/mounts && fail "the device is mounted: $(grep "^/dev/vda " /proc/mounts)"
	reported
	# A picture is one line for the host.
	report "svg=$(tr '\n' ' ' </mnt/bench.svg)"
}
