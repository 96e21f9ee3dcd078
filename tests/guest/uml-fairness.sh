# shellcheck shell=dash
# Two disk processes on one device: dm-delay over a loop device, with a rate that the kernel's throttle keeps, which
# serves requests in the order in which they come. Sourced by uml-init.sh after uml-shares.sh, whose helpers it uses.

case_fairness() {
	mkdir -p /mnt/bin /mnt/slow
	must mount --bind "$tapio_bin" /mnt/bin
	for writable in /run /tmp /dev/shm; do
		[ -d "$writable" ] && must mount -t tmpfs tmpfs "$writable"
	done
	export HOME=/tmp
	for module in loop dm-mod dm-delay; do load "$module"; done
	must truncate -s 48M /mnt/device
	loop=$(losetup --find --show /mnt/device) || fail "no loop device"
	must dmsetup --noudevsync create slow --table "0 $((48 * 2048)) delay $loop 0 0 $loop 0 ${tapio_delay:-10}"
	must dmsetup --noudevsync mknodes
	must mkfs.ext4 -q -F -O ^has_journal /dev/mapper/slow
	must mount -t ext4 /dev/mapper/slow /mnt/slow
	mkdir -p /mnt/blkio
	must mount -t cgroup -o blkio blkio /mnt/blkio
	mkdir /mnt/blkio/disks
	numbers=$(cat "/sys/block/$(basename "$(readlink -f /dev/mapper/slow)")/dev")
	echo $$ >/mnt/blkio/disks/cgroup.procs
	echo "$numbers ${tapio_rate:-16777216}" >/mnt/blkio/disks/blkio.throttle.write_bps_device || fail "no throttle for $numbers"
	/mnt/bin/tapio bench fairness --dir /mnt/slow --only direct --size 8 --seconds "${tapio_seconds:-3}" --rounds 1 \
		--json /mnt/report >/mnt/.out 2>&1 || fail "the run: $(tail -n 3 /mnt/.out | tr '\n' ' ')"
	report "device=$(sed -n 's/^device: //p' /mnt/.out)"
	for sharing in off on; do
		row=$(grep "^direct *$sharing " /mnt/.out) || fail "no row: $(tr '\n' ' ' </mnt/.out)"
		report "ratio_$sharing=$(echo "$row" | awk '{ printf "%d", $5 * 100 }')"
		report "total_$sharing=$(echo "$row" | awk '{ printf "%d", $6 * 1000 }')"
		echo "$row" >&3
	done
	umount /mnt/slow
	true
}
