# Stories of the xen lane with the toolstack's daemon in dom0: its driver makes the domains and writes the disks into
# xenstore, `xe` is typed as an administrator does.

sr_dir=/mnt/sr

# ok WORDS...: what `xe` prints; the story fails when it does.
ok() { xe "$@" 2>/tmp/xe.err || fail "xe $*: $(tr '\n' ' ' </tmp/xe.err)"; }

start_daemon() {
	rm -f /run/tapio/listening
	tapiod --config /dev/null --run-dir /run/tapio --state-dir /mnt/state --mount-dir /mnt/mount "$@" \
		--no-tls --http none >>/tmp/tapiod.log 2>&1 &
	daemon=$!
	wait_for 60 "the daemon to listen" test -s /run/tapio/listening
}

# known NAME VM: the words for guests know a machine of the toolstack's by NAME.
known() {
	eval "domid_$1=$(ok vm-param-get uuid="$2" param-name=dom-id)"
	eval "log_$1=guest-$(xl domname "$(domid "$1")").log"
	wait_for 60 "$1 to boot" grep -q '^AGENT ready' "$(console_log "$1")"
	terminal "$1"
}

# image_of VM PLACE: of the VDI there.
image_of() { echo "$sr_dir/$(ok vbd-list vm-uuid="$1" userdevice="$2" params=vdi-uuid --minimal).vhd"; }

case_toolstack() {
	export TAPIO_SOCKET=/run/tapio/xapi
	mkdir -p $sr_dir
	# The daemon starts one itself where nobody serves the disks.
	kill "$tapback"
	wait "$tapback"
	start_daemon --default-sr $sr_dir
	sr=$(ok sr-list type=file --minimal)
	vm=$(ok vm-install template="Tapio Xen guest" new-name-label=machine)
	ok vm-param-set uuid="$vm" PV-kernel=/boot/vmlinux PV-ramdisk=/boot/guest.cpio \
		PV-args="quiet loglevel=1 panic=-1 tapio_front=max_ring_page_order=2"
	ok vm-param-set uuid="$vm" other-config:shutdown-timeout=60
	ok vm-disk-add vm=machine disk-size=64MiB device=1 >/dev/null
	ok vm-start vm=machine
	known machine "$vm"
	report "toolstack.power=$(ok vm-param-get uuid="$vm" param-name=power-state)"
	in_guest machine "ls /sys/block | grep -c ^xvd"
	report "toolstack.disks=$said"
	in_guest machine facts xvdb
	report "toolstack.facts=$(echo $said)"
	report "toolstack.order=$(xenstore-read "$(front machine 1)/ring-page-order")"
	in_guest machine put xvdb 0 2
	first=$said
	in_guest machine storms xvdb 2
	# A snapshot under that load, and a disk that comes and goes.
	snapshot=$(ok vm-snapshot vm=machine new-name-label=before)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=hot virtual-size=64MiB)
	vbd=$(ok vbd-create vm-uuid="$vm" vdi-uuid="$vdi" device=2)
	ok vbd-plug uuid="$vbd"
	in_guest machine appears xvdc
	in_guest machine put xvdc 1 1
	hot=$said
	ok vbd-unplug uuid="$vbd"
	in_guest machine disappears xvdc
	[ "$(digest "$sr_dir/$vdi.vhd" 1 1)" = "$hot" ] || fail "the plugged disk holds other bytes than the guest wrote"
	in_guest machine calm xvdb 2
	report "toolstack.written=$(echo $said)"
	report "toolstack.xsiostat=$(sample)"
	# The daemon is killed and started again; the guest does not notice.
	kill -9 $daemon
	wait $daemon
	start_daemon
	in_guest machine put xvdb 4 1
	second=$said
	ok vm-shutdown vm=machine
	report "toolstack.after=$(ok vm-param-get uuid="$vm" param-name=power-state)"
	image=$(image_of "$vm" 1)
	[ "$(digest "$image" 0 2)" = "$first" ] && [ "$(digest "$image" 4 1)" = "$second" ] ||
		fail "$image holds other bytes than the guest wrote"
	must vhd-util check -n "$image"
	report "toolstack.depth=$(vhd-util query -d -n "$image" | grep -o '[0-9]*$')"
	# Again, after the guest's reboot.
	ok vm-start vm=machine
	known machine "$vm"
	in_guest machine get xvdb 0 2
	[ "$said" = "$first" ] || fail "the guest reads other bytes than before its reboot"
	ok vm-shutdown vm=machine force=true
	report "toolstack.domains=$(xl list | tail -n +2 | wc -l)"
	report "toolstack.left=$(tap-ctl list | wc -l)"
	kill $daemon
	wait $daemon
}

# A machine without a ramdisk: ours, a shell on its console, which the kernel can end.
case_embedded() {
	export TAPIO_SOCKET=/run/tapio/xapi
	mkdir -p $sr_dir
	cp /xen-blkfront.ko /boot/
	start_daemon --default-sr $sr_dir
	vm=$(ok vm-install template="Tapio Xen guest" new-name-label=small)
	ok vm-param-set uuid="$vm" PV-kernel=/boot/vmlinux other-config:shutdown-timeout=60
	ok vm-start vm=small
	echo 'sleep 3; echo "SIZE $(cat /sys/block/xvda/size)"; echo DONE' | ok console vm=small until=DONE timeout=60 >/tmp/console
	report "embedded.size=$(grep -o '^SIZE [0-9]*' /tmp/console | grep -o '[0-9]*$')"
	ok vm-shutdown vm=small
	report "embedded.power=$(ok vm-param-get uuid="$vm" param-name=power-state)"
	kill $daemon
	wait $daemon
}
