# shellcheck shell=dash
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

# known NAME VM: the words for guests know a VM of the toolstack's by NAME.
known() {
	eval "domid_$1=$(ok vm-param-get uuid="$2" param-name=dom-id)"
	eval "log_$1=guest-$(xl domname "$(domid "$1")").log"
	wait_for 120 "$1 to boot" grep -q '^AGENT ready' "$(console_log "$1")"
	terminal "$1"
}

# image_of VM PLACE: of the VDI there.
image_of() { echo "$sr_dir/$(ok vbd-list vm-uuid="$1" userdevice="$2" params=vdi-uuid --minimal).vhd"; }

# new_vm NAME [PARAMETER...]: a VM whose kernel gets the parameters; $vm.
new_vm() {
	vm=$(ok vm-install template="Tapio Xen guest" new-name-label="$1")
	shift
	ok vm-param-set uuid="$vm" PV-kernel=/boot/vmlinux PV-ramdisk=/boot/guest.cpio other-config:shutdown-timeout=$((60 * pace)) \
		PV-args="quiet loglevel=1 panic=-1 $*"
}

# still_has FIRST SECOND: the guest `served`, which was started again, reads what it wrote before.
still_has() {
	known served "$vm"
	in_guest served get xvdb 0 2
	[ "$said" = "$1" ] || fail "the guest reads other bytes than before it was started again"
	in_guest served get xvdb 4 1
	[ "$said" = "$2" ] || fail "the guest reads other bytes than before it was started again"
}

# is_another VM DOMID: it runs, in another domain than that.
is_another() {
	local domid
	domid=$(xe vm-param-get uuid="$1" param-name=dom-id) && [ "$domid" -gt "$2" ]
}

case_toolstack() {
	export TAPIO_SOCKET=/run/tapio/xapi
	mkdir -p $sr_dir
	# The daemon starts one itself if no process serves the disks.
	kill "$tapback"
	wait "$tapback"
	start_daemon --default-sr $sr_dir
	sr=$(ok sr-list type=file --minimal)
	new_vm served tapio_front=max_ring_page_order=2
	ok vm-disk-add vm=served disk-size=64MiB device=1 >/dev/null
	ok vm-start vm=served
	known served "$vm"
	report "toolstack.power=$(ok vm-param-get uuid="$vm" param-name=power-state)"
	in_guest served "ls /sys/block | grep -c ^xvd"
	report "toolstack.disks=$said"
	in_guest served facts xvdb
	report "toolstack.facts=$(echo $said)"
	report "toolstack.order=$(xenstore-read "$(front served 1)/ring-page-order")"
	in_guest served put xvdb 0 2
	first=$said
	in_guest served storms xvdb 2
	# A snapshot under that load, and a disk that comes and goes.
	snapshot=$(ok vm-snapshot vm=served new-name-label=before)
	vdi=$(ok vdi-create sr-uuid="$sr" name-label=hot virtual-size=64MiB)
	vbd=$(ok vbd-create vm-uuid="$vm" vdi-uuid="$vdi" device=2)
	ok vbd-plug uuid="$vbd"
	in_guest served appears xvdc
	in_guest served put xvdc 1 1
	hot=$said
	ok vbd-unplug uuid="$vbd"
	in_guest served disappears xvdc
	[ "$(digest "$sr_dir/$vdi.vhd" 1 1)" = "$hot" ] || fail "the plugged disk holds other bytes than the guest wrote"
	in_guest served calm xvdb 2
	report "toolstack.written=$(echo $said)"
	report "toolstack.xsiostat=$(sample)"
	# The daemon is killed and started again; the guest does not notice.
	kill -9 $daemon
	wait $daemon
	start_daemon
	in_guest served put xvdb 4 1
	second=$said
	# The guest is asked to end and started again; then it reboots by itself. Its console begins anew each time.
	rm "$(console_log served)"
	ok vm-reboot vm=served
	still_has "$first" "$second"
	was=$domid_served
	rm "$(console_log served)"
	tell served reboot -f
	wait_for 120 "the guest to be started again" is_another "$vm" "$was"
	still_has "$first" "$second"
	ok vm-shutdown vm=served
	report "toolstack.after=$(ok vm-param-get uuid="$vm" param-name=power-state)"
	image=$(image_of "$vm" 1)
	[ "$(digest "$image" 0 2)" = "$first" ] && [ "$(digest "$image" 4 1)" = "$second" ] ||
		fail "$image holds other bytes than the guest wrote"
	must vhd-util check -n "$image"
	report "toolstack.depth=$(vhd-util query -d -n "$image" | grep -o '[0-9]*$')"
	report "toolstack.domains=$(xl list | tail -n +2 | wc -l)"
	report "toolstack.left=$(tap-ctl list | wc -l)"
	kill $daemon
	wait $daemon
}

# A VM with many disks from its start, the last ones with numbers in the extended form; one of these comes and goes.
case_many() {
	export TAPIO_SOCKET=/run/tapio/xapi
	mkdir -p $sr_dir
	start_daemon --default-sr $sr_dir
	new_vm many
	last=$((${tapio_disks:-20} - 1))
	for place in $(seq 1 $last); do ok vm-disk-add vm=many disk-size=4MiB device="$place" >/dev/null; done
	ok vm-start vm=many
	known many "$vm"
	in_guest many disks
	report "many.disks=$said"
	in_guest many mark
	in_guest many marked
	report "many.marked=$said"
	report "many.processes=$(tap-ctl list | wc -l)"
	vbd=$(ok vbd-list vm-uuid="$vm" userdevice=$last --minimal)
	device=$(ok vbd-param-get uuid="$vbd" param-name=device)
	ok vbd-unplug uuid="$vbd"
	in_guest many disappears "$device"
	in_guest many disks
	report "many.without=$said"
	ok vbd-plug uuid="$vbd"
	in_guest many appears "$device"
	in_guest many marked
	report "many.again=$said"
	ok vm-shutdown vm=many force=true
	for place in 1 $last; do
		image=$(image_of "$vm" "$place")
		must vhd-util check -n "$image"
		report "many.$place=$(vhd-util read -n "$image" -r 0 -c 8 | head -n 1)"
	done
	report "many.left=$(tap-ctl list | wc -l)"
	kill $daemon
	wait $daemon
}

# A guest in a container of the processor's.
case_pvh() {
	export TAPIO_SOCKET=/run/tapio/xapi
	mkdir -p $sr_dir
	start_daemon --default-sr $sr_dir
	new_vm pvh
	ok vm-param-set uuid="$vm" platform:xen-type=pvh
	ok vm-start vm=pvh
	known pvh "$vm"
	in_guest pvh cat /sys/hypervisor/guest_type
	report "pvh.type=$said"
	in_guest pvh put xvda 0 2
	written=$said
	in_guest pvh get xvda 0 2
	[ "$said" = "$written" ] || fail "the guest reads other bytes than it wrote"
	ok vm-shutdown vm=pvh
	[ "$(digest "$(image_of "$vm" 0)" 0 2)" = "$written" ] || fail "dom0 reads other bytes than the guest wrote"
	kill $daemon
	wait $daemon
}

# A VM without a ramdisk: ours, a shell on its console, which the kernel can end.
case_embedded() {
	export TAPIO_SOCKET=/run/tapio/xapi
	mkdir -p $sr_dir
	cp /xen-blkfront.ko /boot/
	start_daemon --default-sr $sr_dir
	vm=$(ok vm-install template="Tapio Xen guest" new-name-label=small)
	ok vm-param-set uuid="$vm" PV-kernel=/boot/vmlinux other-config:shutdown-timeout=$((60 * pace))
	ok vm-start vm=small
	echo 'sleep 3; echo "SIZE $(cat /sys/block/xvda/size)"; echo DONE' | ok console vm=small until=DONE timeout=$((60 * pace)) >/tmp/console
	report "embedded.size=$(grep -o '^SIZE [0-9]*' /tmp/console | grep -o '[0-9]*$')"
	ok vm-shutdown vm=small
	report "embedded.power=$(ok vm-param-get uuid="$vm" param-name=power-state)"
	kill $daemon
	wait $daemon
}
