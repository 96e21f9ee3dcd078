//! `xe`: the toolstack's command line, here or over the network.
//!
//! Commands, parameters and output are those that XenServer's users and their scripts know. Lists, `param-get` and
//! their kin are made from the object table; what else a command does is in `commands`.

mod arguments;
mod client;
mod commands;
mod complete;
mod error;
mod generic;
mod help;
mod objects;
mod out;
mod printer;
mod prompt;
mod serve;
mod session;
mod size;
mod task;
mod tls;
mod tunnel;
mod wait;

use std::ffi::OsString;
use std::process::ExitCode;

pub use arguments::XeArguments;
pub use client::Client;
pub use error::Failure;
pub use objects::find;
pub use task::run as long;

use session::Session;

/// Name, and a sentence for the list of tools.
pub const ABOUT: &str = "Manage storage and VMs of a toolstack, here or over the network";

/// The command as the other tools see it: for pages, completions and the list of tools.
pub fn command() -> clap::Command {
    clap::Command::new("xe")
        .about(ABOUT)
        .long_about(format!("{ABOUT}.\n\n{}", help::OPTIONS))
        .after_long_help(help::AFTER)
        .disable_help_flag(true)
        .disable_help_subcommand(true)
        .arg(
            clap::Arg::new("words")
                .value_name("COMMAND [NAME=VALUE]")
                .help("A command and its parameters; 'xe help' lists them")
                .num_args(0..)
                .trailing_var_arg(true)
                .allow_hyphen_values(true),
        )
}

/// Runs `xe` with the program's arguments.
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let words: Vec<String> =
        arguments.into_iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    if words.first().is_some_and(|word| word == "__complete") {
        complete::run(&words[1..]);
        return ExitCode::SUCCESS;
    }
    if words.first().is_some_and(|word| word == "__serve") {
        return serve::run();
    }
    let done = match XeArguments::read(&words) {
        Ok(arguments) => attempt(arguments, Client::connect),
        Err(error) => error.told(),
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Does what was typed, over a connection that is made when it is needed. Whether it went well; what went wrong was
/// said.
fn attempt(
    arguments: XeArguments,
    connect: impl FnOnce(&arguments::Connection) -> error::Result<Client>,
) -> bool {
    let Some(name) = arguments.words.first() else {
        return out::print(&help::overview()).is_ok() && arguments.wants_help;
    };
    match name.as_str() {
        "help" => return help::run(arguments.words.get(1).map(String::as_str), &arguments),
        _ if arguments.wants_help => return help::run(Some(name), &arguments),
        "completion" => return complete::script(arguments.words.get(1).map(String::as_str)),
        _ => {}
    }
    let Some(command) = commands::find(name) else {
        return commands::why_absent(name).map_or_else(|| help::unknown(name), Failure::other).told();
    };
    // What is missing is said before anything is connected to.
    if let Some(missing) = command.missing(&arguments) {
        return Failure::Missing(missing).told();
    }
    if let Err(error) = command.check(&arguments) {
        return error.told();
    }
    let client = match connect(&arguments.connection) {
        Ok(client) => client,
        Err(error) => return error.told(),
    };
    let session = Session { arguments, client };
    let answer = command.execute(&session);
    if let Err(error) = &answer {
        error.tell(&|param| session.client.name_of(param));
    }
    session.client.end();
    answer.is_ok()
}
