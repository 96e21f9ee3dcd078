//! The one command and its names.

use std::process::Command;

use tapio_e2e::disk::{Host, create_vhd, tapio, text, vhd_util};
use tapio_e2e::needs;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;

const NAMES: [&str; 3] = ["tap-ctl", "xsiostat", "vhd-util"];

#[test]
fn it_answers_to_its_names() {
    let scratch = Scratch::on_disk();
    let dir = scratch.join("bin");
    std::fs::create_dir(&dir).expect("a directory");
    run(tapio(&["links"]).arg(&dir)).ok();
    for name in NAMES {
        let by_link = run(Command::new(dir.join(name)).arg("--help"));
        let by_word = run(&mut tapio(&[name, "--help"]));
        // The help of a tool is worth reading under either name, and not that of another.
        for said in [&by_link, &by_word] {
            assert!(said.status.success(), "{said}");
            assert!(format!("{}{}", said.stdout, said.stderr).contains(name), "{said}");
        }
    }
    let image = create_vhd(scratch.join("a.vhd"), 8);
    let said = run(Command::new(dir.join("vhd-util")).args(["query", "-v", "-n", text(&image)])).ok();
    assert_eq!(said, "8\n");
}

#[test]
fn completions_are_valid_and_know_the_commands() {
    needs!("bash");
    let scratch = Scratch::on_disk();
    for (program, word) in [("tapio", "tap-ctl"), ("tap-ctl", "unpause"), ("vhd-util", "coalesce")] {
        let script = run(&mut tapio(&["completions", "bash", program])).ok();
        assert!(script.contains(word), "no {word} in the completions of {program}");
        let file = scratch.join("completions");
        std::fs::write(&file, &script).expect("the script can be written");
        run(Command::new("bash").arg("-n").arg(&file)).ok();
    }
}

#[test]
fn manual_pages_of_every_command_are_written() {
    let scratch = Scratch::on_disk();
    let dir = scratch.join("man");
    run(tapio(&["man"]).arg(&dir)).ok();
    for page in
        ["tapio.1", "tapio-disk.8", "tap-ctl.1", "tap-ctl-pause.1", "vhd-util-coalesce.1", "xsiostat.1"]
    {
        let text = std::fs::read_to_string(dir.join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(text.contains(".TH") && text.contains(".SH"), "{page} is no manual page:\n{text}");
    }
}

#[test]
fn lists_are_json_on_request() {
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 8);
    let tap = host.create(&format!("vhd:{}", text(&image)));
    for arguments in [["tap-ctl", "list", "--json"], ["disk", "list", "--json"], ["disk", "stats", "--json"]]
    {
        let said = run(&mut host.tapio(&arguments)).ok();
        let value: serde_json::Value =
            serde_json::from_str(&said).unwrap_or_else(|error| panic!("{arguments:?}: {error}\n{said}"));
        assert!(value.to_string().contains(&tap.pid.to_string()), "{arguments:?}: {said}");
    }
    tap.destroy();
}

#[test]
fn on_a_terminal_the_list_is_a_table() {
    needs!("script");
    let scratch = Scratch::on_disk();
    let host = Host::new(&scratch);
    let image = create_vhd(scratch.join("a.vhd"), 8);
    let tap = host.create(&format!("vhd:{}", text(&image)));
    let line = format!("{} tap-ctl list", text(&tapio_e2e::tools::our("tapio")));
    let said = run(host.on_host(Command::new("script").args(["-qec", &line, "/dev/null"]))).ok();
    let row = said.lines().find(|line| line.contains("a.vhd")).unwrap_or_else(|| panic!("no row: {said}"));
    let expected = format!("{:>8} {:>4} {:>4} {:>10} {}", tap.pid, tap.minor, 0, "vhd", text(&image));
    assert_eq!(row.trim_end(), expected);
    tap.destroy();
}

#[test]
fn a_mistyped_command_says_what_to_type() {
    for arguments in
        [&["no-such-thing"][..], &["tap-ctl", "list", "--no-such-option"], &["vhd-util", "create"]]
    {
        let said = run(&mut tapio(arguments)).fails();
        assert!(!said.trim().is_empty() && !said.contains("panicked"), "{arguments:?}: {said}");
    }
    let missing = vhd_util(&["query", "-v", "-n", "/nowhere/a.vhd"]);
    assert_eq!(missing.status.code(), Some(libc::ENOENT), "{missing}");
    // XenServer's program prints what failed on standard output.
    assert!(missing.stdout.contains("/nowhere/a.vhd"), "{missing}");
}
