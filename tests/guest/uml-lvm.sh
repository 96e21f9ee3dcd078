# shellcheck shell=dash
# Local SRs over LVM, by the toolstack's daemon and `xe`, on the two disks of a User-mode Linux guest: this kernel has
# the device-mapper that the hosts of the tests may lack. Sourced by uml-init.sh; tapio_bin is where our programs are.

pool=/mnt/m
daemon=
without_udev='activation { udev_sync=0 udev_rules=0 } devices { obtain_device_list_from_udev=0 }'

# plain COMMAND...: one of LVM's programs, as an administrator would run it here.
plain() {
	program=$1
	shift
	"$program" --config "$without_udev" "$@"
}

# Of the host whose directories are called on_host, where there are two.
xe() { TAPIO_SOCKET=/run/${on_host:-tapio}/xapi "$tapio_bin/tapio" xe "$@"; }

# ok COMMAND...: what `xe` prints; the test fails when it does.
ok() { xe "$@" 2>/mnt/.err || fail "xe $*: $(tr '\n' ' ' </mnt/.err) / $(tail -n 3 /mnt/daemon.log | tr '\n' ' ')"; }

# refused TEXT COMMAND...: `xe` must fail, and say TEXT.
refused() {
	text=$1
	shift
	if xe "$@" >/mnt/.out 2>&1; then fail "xe $* worked"; fi
	grep -q "$text" /mnt/.out || fail "xe $* did not say '$text': $(tr '\n' ' ' </mnt/.out)"
}

# same WHAT FOUND EXPECTED
same() { [ "$2" = "$3" ] || fail "$1 is '$2', not '$3'"; }

# start_daemon [STEP]: a daemon whose storage workers die at STEP.
start_daemon() {
	rm -f /run/tapio/listening
	TAPIO_DIE_AT=$1 "$tapio_bin/tapiod" --config /dev/null --run-dir /run/tapio --state-dir /mnt/state \
		--mount-dir "$pool" --no-tls --http none >>/mnt/daemon.log 2>&1 &
	daemon=$!
	waited=0
	while [ ! -s /run/tapio/listening ]; do
		sleep 0.05
		waited=$((waited + 1))
		[ "$waited" -lt 600 ] || fail "the daemon does not come up: $(tail -n 5 /mnt/daemon.log | tr '\n' ' ')"
	done
}

stop_daemon() {
	kill "$daemon"
	wait "$daemon"
}

# dies COMMAND...: the storage worker ends in this command, and the daemon is killed before it does anything about it.
dies() {
	if xe "$@" >/mnt/.out 2>&1; then fail "the worker survived xe $*"; fi
	kill -9 "$daemon"
	wait "$daemon" && fail "the daemon ended well"
	true
}

# clean DISK...: nothing says any more that anything was there.
clean() {
	for found in "$@"; do
		same "what $found holds" "$(blkid -p -o export "$found")" ""
	done
	same "the volume groups" "$(plain vgs --noheadings -o vg_name 2>/dev/null)" ""
}

sr_create() { ok sr-create name-label=local type=ext "$@"; }
pbd_of() { ok pbd-list sr-uuid="$1" --minimal; }

# holds SR VDI BYTE: the first mebibyte of a VDI is BYTE, by a copy that another project's program reads.
holds() {
	copy=$(ok vdi-copy uuid="$2" sr-uuid="$1")
	must qemu-io -r -f vpc -c "read -P $3 0 1M" -c "read -P 0 1M 1M" "$pool/$1/$copy.vhd"
	grep -q "verification failed" /mnt/.out && fail "VDI $2 does not hold $3"
	ok vdi-destroy uuid="$copy"
}

# An SR from its making to its end.
life() {
	devices=$1
	sr=$(sr_create device-config:device="$devices")
	pbd=$(pbd_of "$sr")
	same "the volume of the SR" "$(plain lvs --noheadings -o vg_name,lv_name,stripes | tr -s ' ')" \
		" XSLocalEXT-$sr $sr $2"
	mountpoint -q "$pool/$sr" || fail "SR $sr is not mounted"
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=data virtual-size=16MiB)
	must qemu-io -f vpc -c "write -P 7 0 1M" "$pool/$sr/$vdi.vhd"
	snapshot=$(ok vdi-snapshot uuid="$vdi")
	must "$tapio_bin/tapio" vhd-util query -n "$pool/$sr/$vdi.vhd" -p
	holds "$sr" "$snapshot" 7
	holds "$sr" "$vdi" 7
	refused "in use" sr-create name-label=x type=ext device-config:device="${devices%,*}" \
		device-config:force=true
	# Detached, probed, forgotten and introduced again.
	ok pbd-unplug uuid="$pbd"
	[ ! -e "/dev/XSLocalEXT-$sr/$sr" ] || fail "the volume stays active"
	refused "holds SR $sr" sr-create name-label=x type=ext device-config:device="$devices"
	ok sr-probe type=ext device-config:device="$devices" >/mnt/probe
	same "SRs that the probe finds" "$(grep -c "^[[:space:]]*$sr\$" /mnt/probe)" 1
	ok sr-forget uuid="$sr"
	# Plain programs read it.
	must plain vgchange -ay "XSLocalEXT-$sr"
	must mount -o ro "/dev/XSLocalEXT-$sr/$sr" "$dir"
	[ -s "$dir/$snapshot.vhd" ] || fail "the snapshot's image is not there: $(ls "$dir")"
	must umount "$dir"
	must plain vgchange -an "XSLocalEXT-$sr"
	ok sr-introduce uuid="$sr" name-label=again type=ext >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" device-config:device="$devices")
	ok pbd-plug uuid="$pbd"
	holds "$sr" "$vdi" 7
	refused "not empty\|NOT_EMPTY" sr-destroy uuid="$sr"
	ok vdi-destroy uuid="$vdi"
	ok vdi-destroy uuid="$snapshot"
	ok sr-destroy uuid="$sr"
	# shellcheck disable=SC2046 # One argument for each word.
	clean $(echo "$devices" | tr , ' ')
	[ ! -e "/dev/XSLocalEXT-$sr" ] || fail "a directory of the group stays in /dev"
}

# Devices that another program made LVM's.
foreign_groups() {
	must plain vgcreate other /dev/vda
	refused "volume group other" sr-create name-label=x type=ext device-config:device=/dev/vda
	must plain lvcreate -y -n busy -l 4 other
	refused "in use" sr-create name-label=x type=ext device-config:device=/dev/vda \
		device-config:force=true
	must plain lvs other/busy
	must plain vgchange -an other
	ok sr-probe type=ext device-config:device=/dev/vda >/mnt/probe
	grep -q UUID /mnt/probe && fail "a foreign group is no SR: $(cat /mnt/probe)"
	sr=$(sr_create device-config:device=/dev/vda device-config:force=true)
	ok sr-destroy uuid="$sr"
	clean /dev/vda
}

# An SR as XenServer lays it out, with a disk in it.
from_xenserver() {
	sr=$(cat /proc/sys/kernel/random/uuid)
	vdi=$(cat /proc/sys/kernel/random/uuid)
	must plain pvcreate -ff -y --metadatasize 10M /dev/vda
	must plain vgcreate "XSLocalEXT-$sr" /dev/vda
	must plain lvcreate -y -n "$sr" -l 100%FREE "XSLocalEXT-$sr"
	must mkfs.ext3 -q "/dev/XSLocalEXT-$sr/$sr"
	must mount "/dev/XSLocalEXT-$sr/$sr" "$dir"
	must "$tapio_bin/tapio" vhd-util create -n "$dir/$vdi.vhd" -s 16
	must qemu-io -f vpc -c "write -P 9 0 1M" "$dir/$vdi.vhd"
	must umount "$dir"
	must plain vgchange -an "XSLocalEXT-$sr"
	ok sr-probe type=ext device-config:device=/dev/vda >/mnt/probe
	grep -q "$sr" /mnt/probe || fail "the probe does not find $sr: $(cat /mnt/probe)"
	ok sr-introduce uuid="$sr" name-label=theirs type=ext >/dev/null
	pbd=$(ok pbd-create sr-uuid="$sr" host-uuid="$(ok host-list --minimal)" device-config:device=/dev/vda)
	ok pbd-plug uuid="$pbd"
	same "the disks of XenServer's SR" "$(ok vdi-list sr-uuid="$sr" --minimal)" "$vdi"
	holds "$sr" "$vdi" 9
	ok vdi-destroy uuid="$vdi"
	ok sr-destroy uuid="$sr"
	clean /dev/vda
}

# The work dies between the steps; what it left is finished, undone, or hinders no later work.
kills() {
	set -- begin marked grouped volume-made formatted
	for step in "$@"; do
		start_daemon "sr-create:$step"
		same "SRs before a kill at $step" "$(ok sr-list type=ext --minimal)" ""
		dies sr-create name-label=local type=ext device-config:device=/dev/vda
	done
	start_daemon sr-erase:begin
	sr=$(ok sr-list type=ext --minimal)
	mountpoint -q "$pool/$sr" || fail "the SR that was made is not plugged: '$sr'"
	for step in sr-erase:unmounted sr-erase:group-gone ''; do
		dies sr-destroy uuid="$sr"
		# Without a step: the recovery comes past the same places.
		start_daemon ''
		same "SRs after a kill of a destroy" "$(ok sr-list type=ext --minimal)" ""
		same "groups after it" "$(plain vgs --noheadings -o vg_name 2>/dev/null)" ""
		sr=$(sr_create device-config:device=/dev/vda)
		stop_daemon
		start_daemon "$step"
	done
	ok sr-destroy uuid="$sr"
	clean /dev/vda
	stop_daemon
}

lvm_here() {
	modules=/usr/lib/uml/modules/$(uname -r)
	driver=$(find "$modules" -name 'dm-mod.ko*' | head -n 1)
	if [ -n "$driver" ]; then busybox insmod "$driver" || fail "the kernel refused $driver"; fi
	# The programs may lie below a directory that is about to be hidden.
	mkdir -p /mnt/bin
	must mount --bind "$tapio_bin" /mnt/bin
	tapio_bin=/mnt/bin
	for writable in /run /tmp /etc/lvm; do must mount -t tmpfs tmpfs "$writable"; done
	export HOME=/tmp LVM_SUPPRESS_FD_WARNINGS=1
	[ -b /dev/vdb ] || fail "the guest has one disk only"
}

case_lvm() {
	lvm_here
	start_daemon
	life /dev/vda,/dev/vdb 2
	report "life=$(seconds)"
	foreign_groups
	report "foreign=$(seconds)"
	from_xenserver
	report "xenserver=$(seconds)"
	stop_daemon
}

case_lvm_kills() {
	lvm_here
	kills
	report "kills=$(seconds)"
}
