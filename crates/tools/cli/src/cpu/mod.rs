//! `tapio cpu`: which processors there are, what runs on them, and a policy for disks and guests.

mod policy;
mod running;
mod topology;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;

use serde::Serialize;
use serde_json::Value;
use tapio_report::failure;
use tapio_stat::ShmRoot;

use crate::xe::{Client, Failure, XeArguments};
use policy::{Disk, Guest, Plan, Wanted, plan};
use running::{DiskProcess, Process, disk_processes, guest_processes, memory_node};
use topology::{Topology, list, parse_list};

/// Options of `tapio cpu`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "Examples:
  tapio cpu                         processors, and what runs on them
  tapio cpu --plan                  where disks and guests should run
  tapio cpu --plan --data 4 --exclusive
  tapio cpu --apply                 and tie them there now
  tapio cpu --xl                    the same for a host whose guests xl runs: its commands

The policy keeps whole cores for disk processes, on the NUMA nodes of their guests and devices, and guests off them. A
guest and its disks are on one node: that of its mask (VCPUs-params:mask), of its memory, or of the device below its
disks. --apply ties the threads that run now, and what they start later; after a plug or a start, apply again.")]
pub struct CpuArguments {
    /// Print where disks and guests should run
    #[arg(long)]
    plan: bool,
    /// Tie disk processes and guests to these processors
    #[arg(long, conflicts_with_all = ["xl"])]
    apply: bool,
    /// Print commands for a host with xl: vCPUs of its control domain, masks of guests
    #[arg(long)]
    xl: bool,
    /// Processors that are kept for disks; a quarter of the host, at most 8, without
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    data: Option<u16>,
    /// Give each guest processors of its own while there are enough
    #[arg(long)]
    exclusive: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Where to connect, as 'xe' takes it; without a daemon, disks alone are known
    #[arg(last = true, value_name = "XE OPTION")]
    xe: Vec<String>,
}

/// A guest of the toolstack that runs.
#[derive(Debug, Serialize)]
struct Running {
    vm: String,
    name: String,
    domid: u32,
    vcpus: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_node: Option<usize>,
    processes: Vec<Process>,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
struct Found {
    cpus: Topology,
    disks: Vec<DiskProcess>,
    guests: Vec<Running>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Plan>,
}

pub fn run(arguments: &CpuArguments) -> ExitCode {
    match examine(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error.report();
            ExitCode::FAILURE
        }
    }
}

fn examine(arguments: &CpuArguments) -> Result<(), Failure> {
    let cpus = Topology::of_host()
        .ok_or_else(|| Failure::other("the kernel's list of processors cannot be read"))?;
    let root = ShmRoot::from_env();
    let disks = disk_processes(&root)
        .map_err(|error| Failure::other(format!("cannot list {}: {error}", root.pages().display())))?;
    let guests = guests(arguments)?;
    let mut found = Found { cpus, disks, guests, plan: None };
    if arguments.plan || arguments.apply || arguments.xl {
        let (guests, disks) = found.inputs();
        let wanted = Wanted { data: arguments.data.map(usize::from), exclusive: arguments.exclusive };
        found.plan = Some(plan(&found.cpus, &guests, &disks, wanted));
    }
    if arguments.apply {
        found.apply()?;
    }
    let text = match (&found.plan, arguments.json, arguments.xl) {
        (_, true, _) => {
            serde_json::to_string_pretty(&found).map_err(|error| Failure::other(error.to_string()))? + "\n"
        }
        (Some(plan), _, true) => xl(&found.cpus, plan),
        (Some(plan), ..) => plan_text(plan),
        (None, ..) => table(&found),
    };
    failure::print(&failure::harmless(&text)).map_err(|error| Failure::other(error.to_string()))
}

/// The guests that run; none where no daemon answers and none was named.
fn guests(arguments: &CpuArguments) -> Result<Vec<Running>, Failure> {
    let xe = XeArguments::read(&arguments.xe)?;
    let client = match Client::connect(&xe.connection) {
        Ok(client) => client,
        Err(_) if arguments.xe.is_empty() => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let records = client.call("VM.get_all_records", &[]);
    client.end();
    let records = records?;
    let records = records.as_object().into_iter().flat_map(|records| records.values());
    let mut guests: Vec<Running> = records.filter_map(running_vm).collect();
    guests.sort_by(|a, b| a.vm.cmp(&b.vm));
    let mut processes = guest_processes(&guests.iter().map(|guest| guest.vm.clone()).collect());
    for guest in &mut guests {
        guest.processes = processes.remove(&guest.vm).unwrap_or_default();
        guest.memory_node = memory_node(&guest.processes);
    }
    Ok(guests)
}

fn running_vm(record: &Value) -> Option<Running> {
    let text = |key: &str| record.get(key).and_then(Value::as_str);
    let number = |key: &str| {
        let value = record.get(key)?;
        value.as_i64().or_else(|| value.as_str()?.parse().ok())
    };
    let runs =
        text("power_state") == Some("Running") && record.get("is_control_domain")?.as_bool() == Some(false);
    runs.then_some(())?;
    let mask = record.get("VCPUs_params").and_then(|params| params.get("mask")?.as_str()).map(str::to_owned);
    Some(Running {
        vm: text("uuid")?.to_owned(),
        name: text("name_label").unwrap_or_default().to_owned(),
        domid: number("domid").and_then(|domid| u32::try_from(domid).ok()).unwrap_or(0),
        vcpus: number("VCPUs_max").and_then(|count| usize::try_from(count).ok()).unwrap_or(1),
        mask,
        memory_node: None,
        processes: Vec::new(),
    })
}

impl Found {
    /// What the policy decides by.
    fn inputs(&self) -> (Vec<Guest>, Vec<Disk>) {
        let guest = |guest: &Running| Guest {
            vm: guest.vm.clone(),
            vcpus: guest.vcpus,
            mask: guest.mask.as_deref().and_then(parse_list).filter(|mask| !mask.is_empty()),
            memory_node: guest.memory_node,
        };
        let disk = |disk: &DiskProcess| Disk {
            pid: disk.process.pid,
            vm: self
                .guests
                .iter()
                .find(|guest| disk.domids.contains(&guest.domid))
                .map(|guest| guest.vm.clone()),
            device_node: disk.device_node,
        };
        (self.guests.iter().map(guest).collect(), self.disks.iter().map(disk).collect())
    }

    fn apply(&self) -> Result<(), Failure> {
        let Some(plan) = &self.plan else { return Ok(()) };
        let failed = |what: String, error: std::io::Error| {
            Failure::other(format!("{what} cannot be tied to processors: {error}; run it as root"))
        };
        for disk in &self.disks {
            if let Some(cpus) = plan.disks.get(&disk.process.pid) {
                let what = || format!("disk process {}", disk.process.pid);
                disk.process.pin(cpus).map_err(|error| failed(what(), error))?;
            }
        }
        for guest in &self.guests {
            let Some(cpus) = plan.guests.get(&guest.vm) else { continue };
            for process in &guest.processes {
                process.pin(cpus).map_err(|error| failed(format!("VM {}", guest.vm), error))?;
            }
        }
        Ok(())
    }
}

/// The table of `xenpm get-cpu-topology`, and what ran on each processor last. Writing to a string cannot fail.
fn table(found: &Found) -> String {
    let mut runs: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let mut add = |label: &str, process: &Process| {
        for thread in &process.threads {
            runs.entry(thread.cpu).or_default().push(format!("{label}/{}", thread.name));
        }
    };
    for disk in &found.disks {
        add(&format!("disk {}", disk.process.pid), &disk.process);
    }
    for guest in &found.guests {
        guest.processes.iter().for_each(|process| add(&format!("guest {}", guest.name), process));
    }
    let mut out = String::from("CPU      core     socket   node     ran last\n");
    for cpu in &found.cpus.0 {
        let names = runs.remove(&cpu.cpu).unwrap_or_default().join(", ");
        let name = format!("CPU{}", cpu.cpu);
        let line = format!("{name:<8} {:<8} {:<8} {:<8} {names}", cpu.core, cpu.socket, cpu.node);
        let _ = writeln!(out, "{}", line.trim_end());
    }
    for disk in &found.disks {
        let allowed = disk.process.threads.first().map_or_else(String::new, |thread| list(&thread.allowed));
        let _ = writeln!(
            out,
            "disk process {} may run on {allowed}: {}",
            disk.process.pid,
            disk.disks.join("; ")
        );
    }
    for guest in &found.guests {
        let first = guest.processes.first().and_then(|process| process.threads.first());
        let allowed = first.map_or_else(|| "-".to_owned(), |thread| list(&thread.allowed));
        let _ = writeln!(out, "guest {} may run on {allowed}: {}", guest.name, guest.vm);
    }
    out
}

fn plan_text(plan: &Plan) -> String {
    let mut out = String::new();
    for (node, cpus) in &plan.data {
        let _ = writeln!(out, "node {node}: processors {} are kept for disks", list(cpus));
    }
    for (pid, cpus) in &plan.disks {
        let _ = writeln!(out, "disk process {pid}: {}", list(cpus));
    }
    for (vm, cpus) in &plan.guests {
        let _ = writeln!(out, "VM {vm}: {}", list(cpus));
    }
    for note in &plan.notes {
        let _ = writeln!(out, "note: {note}");
    }
    if out.is_empty() {
        out.push_str("no disk process and no guest runs\n");
    }
    out
}

/// How many vCPUs the control domain of a Xen host gets: 8 or 6 where there are cores enough, else half of them.
fn control_vcpus(cores: usize) -> usize {
    match cores {
        16.. => 8,
        12..16 => 6,
        _ => (cores / 2).max(1),
    }
}

/// The guide's advice for a host with xl: vCPUs of the control domain pinned, guests on the other processors.
fn xl(cpus: &Topology, plan: &Plan) -> String {
    let count = control_vcpus(cpus.nodes().iter().map(|node| cpus.cores(*node).len()).sum());
    let node = plan.data.keys().next().copied().or_else(|| cpus.nodes().first().copied()).unwrap_or(0);
    let mut own: Vec<usize> = cpus.of_node(node).into_iter().collect();
    own.extend(cpus.all().into_iter().filter(|cpu| !cpus.of_node(node).contains(cpu)));
    own.truncate(count);
    let rest = cpus.all().into_iter().filter(|cpu| !own.contains(cpu)).collect();
    let mut out = format!(
        "# the control domain: {count} vCPUs on node {node}; from the next start of the host on\n\
         /opt/xensource/libexec/xen-cmdline --set-xen dom0_max_vcpus=1-{count}\n\
         /opt/xensource/libexec/xen-cmdline --set-xen dom0_vcpus_pin\n# and now\n"
    );
    for (vcpu, cpu) in own.iter().enumerate() {
        let _ = writeln!(out, "xl vcpu-pin Domain-0 {vcpu} {cpu}");
    }
    out.push_str("# guests on the other processors, from their next start on\n");
    if plan.guests.is_empty() {
        let _ = writeln!(out, "xe vm-param-set uuid=VM VCPUs-params:mask={}", list(&rest));
    }
    for (vm, cpus) in &plan.guests {
        let off: topology::Cpus = cpus.difference(&own.iter().copied().collect()).copied().collect();
        let mask = if off.is_empty() { &rest } else { &off };
        let _ = writeln!(out, "xe vm-param-set uuid={vm} VCPUs-params:mask={}", list(mask));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::topology::tests::guide;
    use super::*;

    #[test]
    fn the_table_is_xenpms_and_says_what_ran_where() {
        let thread = running::Thread { tid: 7, name: "data".into(), cpu: 6, allowed: [6, 7].into() };
        let process = Process { pid: 7, threads: vec![thread] };
        let disk = DiskProcess { process, disks: vec!["0 vhd:/a".into()], ..DiskProcess::default() };
        let found = Found { cpus: guide(), disks: vec![disk], guests: Vec::new(), plan: None };
        let text = table(&found);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("CPU      core     socket   node"), "{text}");
        assert_eq!(lines[7], "CPU6     6        0        1        disk 7/data");
        assert_eq!(lines[24], "CPU23    11       1        2");
        assert_eq!(lines[25], "disk process 7 may run on 6-7: 0 vhd:/a");
    }

    #[test]
    fn the_guides_advice_for_its_own_host() {
        let text = xl(&guide(), &Plan::default());
        assert!(text.contains("dom0_max_vcpus=1-8") && text.contains("dom0_vcpus_pin"), "{text}");
        assert!(
            text.contains("xl vcpu-pin Domain-0 0 0\n") && text.contains("xl vcpu-pin Domain-0 5 5\n"),
            "{text}"
        );
        assert!(text.ends_with("VCPUs-params:mask=8-23\n"), "{text}");
        assert_eq!([4, 12, 13, 16, 64].map(control_vcpus), [2, 6, 6, 8, 8]);
    }

    #[test]
    fn guests_that_run_are_read_from_their_records() {
        let record = |state: &str, control: bool| {
            serde_json::json!({"uuid": "u", "name_label": "web", "power_state": state, "is_control_domain": control,
                "domid": "5", "VCPUs_max": 2, "VCPUs_params": {"mask": "1,2"}})
        };
        let found = running_vm(&record("Running", false)).expect("it runs");
        assert_eq!((found.domid, found.vcpus, found.mask.as_deref()), (5, 2, Some("1,2")));
        assert!(
            running_vm(&record("Halted", false)).is_none() && running_vm(&record("Running", true)).is_none()
        );
    }
}
