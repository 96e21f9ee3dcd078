#!/bin/sh
# First program of the User-mode Linux guest. Its root is the host's file tree, read only, through hostfs; what it
# writes goes to a tmpfs on /mnt and to the disk under test. Parameters come from the kernel command line, which
# hands every unknown key=value to the first program as an environment variable:
#   tapio_case   which function below to run
#   tapio_fs     ext4 or xfs
#   tapio_dir    a directory of the host, for cases that are told to stop by a file in it
#   tapio_mib    how much to write, in mebibytes
#   tapio_bin    where our programs are, for cases that run them
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /mnt
here=$(dirname "$0")
. "$here/lib.sh"
. "$here/uml-lvm.sh"
. "$here/uml-shares.sh"
. "$here/uml-devices.sh"
. "$here/uml-cloud-init.sh"
. "$here/uml-iscsi.sh"
. "$here/uml-volumes.sh"
. "$here/uml-thin.sh"
. "$here/uml-resign.sh"
. "$here/uml-writes.sh"
. "$here/uml-profile.sh"
. "$here/uml-bench.sh"
. "$here/uml-hosts.sh"
. "$here/uml-nfs-hosts.sh"
disk=/dev/vda
dir=/mnt/disk
mkdir -p "$dir"
fs=${tapio_fs:-ext4}
mib=${tapio_mib:-32}
# Where the distribution made the driver a module, it lies apart from the modules of the host's own kernel.
driver=$(find "/usr/lib/uml/modules/$(uname -r)" -name 'virtio_blk.ko*' 2>/dev/null | head -n 1)
if [ -n "$driver" ]; then busybox insmod "$driver" || fail "the kernel refused $driver"; fi
[ -b "$disk" ] || fail "the guest sees no disk at $disk"

make_fs() {
	case $fs in
	ext4) must mkfs.ext4 -q -F "$disk" ;;
	xfs) must mkfs.xfs -q -f "$disk" ;;
	*) fail "unknown file system '$fs'" ;;
	esac
}

check_fs() {
	case $fs in
	ext4) must e2fsck -f -n "$disk" ;;
	xfs) must xfs_repair -n "$disk" ;;
	esac
}

mount_fs() { must mount -t "$fs" "$@" "$disk" "$dir"; }
unmount_fs() { must umount "$dir"; }

case_probe() { describe "$disk"; }

# Make, fill, unmount, check, mount again, compare.
case_fs() {
	describe "$disk"
	make_fs
	mount_fs
	fill "$dir" 4 $((mib / 4))
	before=$(tree_digest "$dir")
	unmount_fs
	check_fs
	drop_caches
	mount_fs
	after=$(tree_digest "$dir")
	unmount_fs
	[ "$before" = "$after" ] || fail "digest was $before, and is $after after mounting again"
	report "tree=$after"
}

# Change an existing file system: some files anew, some removed, some added.
case_change() {
	mount_fs
	dd if=/dev/urandom of="$dir/file0" bs=1048576 count=$((mib / 4)) conv=notrunc 2>/dev/null || fail "rewriting file0"
	rm -f "$dir/file1" || fail "removing file1"
	dd if=/dev/urandom of="$dir/${tapio_name:-added}" bs=65536 count=$((mib * 2)) 2>/dev/null || fail "adding a file"
	sync
	drop_caches
	report "tree=$(tree_digest "$dir")"
	unmount_fs
	check_fs
}

# Read what an earlier guest left.
case_verify() {
	check_fs
	mount_fs -o ro
	report "tree=$(tree_digest "$dir")"
	unmount_fs
}

# Give the file system's free space back.
case_trim() {
	mount_fs
	rm -f "$dir"/file*
	sync
	must fstrim "$dir"
	report "tree=$(tree_digest "$dir")"
	unmount_fs
	check_fs
}

# Write and verify until $tapio_dir/stop appears. Every round writes a file with fsync, drops the caches and
# reads an earlier one back; "round" lines let the runner time its own actions.
case_load() {
	make_fs
	mount_fs
	round=0
	longest=0
	start=$(seconds)
	report "started=$start"
	while [ ! -e "$tapio_dir/stop" ]; do
		slot=$((round % 8))
		at=$(seconds)
		dd if=/dev/urandom of="$dir/load$slot" bs=65536 count=$((mib * 16 / 8)) conv=fsync 2>/dev/null ||
			fail "writing load$slot in round $round"
		took=$(echo "$(seconds) $at" | awk '{ printf "%d", ($1 - $2) * 1000 }')
		[ "$took" -gt "$longest" ] && longest=$took
		sha256sum <"$dir/load$slot" >"/mnt/sum$slot"
		drop_caches
		older=$(((round + 5) % 8))
		if [ -e "/mnt/sum$older" ]; then
			sha256sum <"$dir/load$older" | cmp -s - "/mnt/sum$older" || fail "load$older differs in round $round"
		fi
		round=$((round + 1))
		report "round=$round"
		if [ "$round" -ge 4000 ]; then fail "the host did not ask this guest to stop"; fi
	done
	end=$(seconds)
	for slot in 0 1 2 3 4 5 6 7; do
		[ -e "/mnt/sum$slot" ] || continue
		sha256sum <"$dir/load$slot" | cmp -s - "/mnt/sum$slot" || fail "load$slot differs at the end"
	done
	report "tree=$(tree_digest "$dir")"
	unmount_fs
	check_fs
	report "rounds=$round"
	report "longest_write_ms=$longest"
	report "load_seconds=$(echo "$end $start" | awk '{ printf "%.2f", $1 - $2 }')"
	# Fields of /sys/block/*/stat: reads, merged, sectors, ms, writes, merged, sectors, ms, in flight, ...
	# shellcheck disable=SC2046 # One argument for each word.
	set -- $(cat /sys/block/vda/stat)
	report "reads=$1" && report "read_sectors=$3" && report "writes=$5" && report "write_sectors=$7"
}

# The disk must refuse every write.
case_read_only() {
	describe "$disk"
	if dd if=/dev/zero of="$disk" bs=4096 count=1 oflag=direct 2>/dev/null; then fail "a write was accepted"; fi
	must dd if="$disk" of=/dev/null bs=65536 count=16 iflag=direct
}

case "$tapio_case" in
'' | *[!a-z_]*) fail "'$tapio_case' is no case" ;;
esac
type "case_$tapio_case" >/dev/null 2>&1 || fail "unknown case '$tapio_case'"
"case_$tapio_case"
report status=ok
halt_guest
