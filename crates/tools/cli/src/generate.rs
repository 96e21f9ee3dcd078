//! What is made from the definitions of the commands: completions, manual pages, and the links of their names.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use clap_complete::Shell;
use tapio_control::program::{ABOUT, DESCRIPTION, ENVIRONMENT, OPTIONS};
use tapio_control::{ControlError, Errno};

use crate::TOOLS;
use tapio_report::failure::{Result, print};

/// Prints the completions of one program.
pub fn completions(shell: Shell, program: &str, mut command: clap::Command) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, program, &mut text);
    print(&String::from_utf8_lossy(&text))
}

fn io_error(doing: &str, path: &Path, error: &io::Error) -> ControlError {
    ControlError::io(format_args!("{doing} {}", path.display()), error)
}

/// Writes a page for each of the commands into the directory: section 1 for commands, section 8 for the disk program.
pub fn manual(dir: &Path, commands: impl IntoIterator<Item = clap::Command>) -> Result<()> {
    tapio_sys::private::files_for_all_readers();
    fs::create_dir_all(dir).map_err(|error| io_error("making", dir, &error))?;
    for command in commands {
        clap_mangen::generate_to(command, dir)
            .map_err(|error| io_error("writing pages into", dir, &error))?;
    }
    let path = dir.join("tapio-disk.8");
    let mut page = Vec::new();
    // Writing to memory cannot fail.
    let _ = clap_mangen::Man::new(disk_program()).section("8").title("TAPIO-DISK").render(&mut page);
    fs::write(&path, page).map_err(|error| io_error("writing", &path, &error))
}

/// The disk program's options in the form that pages are made from. The program itself parses them without a library.
fn disk_program() -> clap::Command {
    let mut environment = String::from("ENVIRONMENT\n");
    for (name, help) in ENVIRONMENT {
        environment.push_str(&format!("{name}: {help}\n"));
    }
    let command = clap::Command::new("tapio-disk")
        .about(ABOUT)
        .long_about(format!("{ABOUT}.\n\n{DESCRIPTION}"))
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_flag(true)
        .disable_version_flag(true)
        .after_long_help(environment);
    OPTIONS.iter().fold(command, |command, option| {
        let name = option.name.trim_start_matches('-');
        let argument = clap::Arg::new(name).long(name).help(option.help);
        command.arg(match option.value {
            Some(value) if option.repeats => argument.value_name(value).action(clap::ArgAction::Append),
            Some(value) => argument.value_name(value).action(clap::ArgAction::Set),
            None => argument.action(clap::ArgAction::SetTrue),
        })
    })
}

/// Makes a link of each tool's name to this program.
pub fn links(dir: &Path, force: bool) -> Result<()> {
    let program =
        std::env::current_exe().map_err(|error| ControlError::io("finding this program", &error))?;
    for tool in TOOLS {
        let link = dir.join(tool);
        match fs::read_link(&link) {
            Ok(target) if target == program => continue,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ if force => fs::remove_file(&link).map_err(|error| io_error("replacing", &link, &error))?,
            _ => {
                return Err(ControlError::new(
                    Errno::EEXIST,
                    format!("{} is something else", link.display()),
                )
                .next("give --force to replace it"));
            }
        }
        symlink(&program, &link).map_err(|error| io_error("making the link", &link, &error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().expect("temporary directory");
        manual(dir.path(), crate::tapio::programs()).expect("written");
        for page in [
            "tapio.1",
            "tap-ctl.1",
            "tap-ctl-unpause.1",
            "xsiostat.1",
            "vhd-util.1",
            "cbt-util-coalesce.1",
            "tapio-disk-mirror-start.1",
            "tapio-disk-list.1",
            "tapio-disk.8",
        ] {
            let text = fs::read_to_string(dir.path().join(page)).expect(page);
            assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{page}");
        }
        let disk = fs::read_to_string(dir.path().join("tapio-disk.8")).expect("page");
        for option in OPTIONS {
            assert!(disk.contains(&option.name.replace('-', "\\-")), "{} is missing", option.name);
        }
    }

    #[test]
    fn links_lead_here_and_spare_what_is_there() {
        let dir = tempfile::tempdir().expect("temporary directory");
        links(dir.path(), false).expect("made");
        links(dir.path(), false).expect("again is no error");
        let program = std::env::current_exe().expect("known");
        for tool in TOOLS {
            assert_eq!(fs::read_link(dir.path().join(tool)).expect(tool), program);
        }
        fs::remove_file(dir.path().join("xsiostat")).expect("removed");
        fs::write(dir.path().join("xsiostat"), "mine").expect("written");
        assert_eq!(links(dir.path(), false).expect_err("spared").errno, Errno::EEXIST);
        links(dir.path(), true).expect("replaced");
        assert_eq!(fs::read_link(dir.path().join("xsiostat")).expect("link"), program);
    }
}
