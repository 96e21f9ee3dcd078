# shellcheck shell=dash disable=SC2154
# cloud-init's own reader of settings on a medium (data source NoCloud), Debian's package as it is: it finds the disk by
# its label, mounts it, and reads it. Sourced by uml-init.sh.
#   tapio_cloud   where scripts/setup unpacked the package

case_cloud_init() {
	local driver
	mount -t tmpfs tmpfs /run
	mount -t tmpfs tmpfs /tmp
	mkdir -p /run/lock /mnt/cloud
	for driver in cdrom isofs; do
		driver=$(find "/usr/lib/uml/modules/$(uname -r)" -name "$driver.ko*" | head -n 1)
		[ -z "$driver" ] || busybox insmod "$driver" || fail "the kernel refused $driver"
	done
	PYTHONPATH=$tapio_cloud PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 "$here/nocloud.py" >/mnt/said 2>/mnt/.out ||
		fail "cloud-init's reader ended with $?: $(tail -n 5 /mnt/.out | tr '\n' ' ')"
	while read -r line; do report "$line"; done </mnt/said
}
