//! What a run does.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tapio_report::failure::Result;

use super::ground::Sizes;
use super::report::Skipped;
use super::server::{SERVERS, Server};
use super::site::Site;
use super::workload::{WORKLOADS, Workload};
use super::{Arguments, invalid};

/// Steps that are no workload, as `--only` names them.
const EXTRA: [&str; 2] = ["start", "memory"];
/// Where images are made if no directory is given: in memory, and on a disk if the second is one.
const DIRS: [&str; 2] = ["/dev/shm", "/var/tmp"];
/// An image without data.
const FRESH_LEN: u64 = 64 << 30;
/// Bytes that one of those may take, whatever is free.
const FRESH_SPACE_MAX: u64 = 32 << 30;
const FRESH_MEMORY_MAX: u64 = 4 << 30;

/// What is run.
#[derive(Debug)]
pub struct Plan {
    pub dirs: Vec<PathBuf>,
    pub workloads: Vec<Workload>,
    pub servers: Vec<(Server, PathBuf)>,
    pub starts: bool,
    pub memory: bool,
    pub time: Duration,
    pub warm_up: Duration,
    pub rounds: usize,
    pub quick: bool,
    pub skipped: Vec<Skipped>,
}

/// Which names remain when `only` is asked for: those with one of its words in them, or all if no word fits any. A word
/// that is a whole name means that one alone.
fn chosen<'a>(names: &[&'a str], only: &[String]) -> Vec<&'a str> {
    let fits =
        |word: &str, name: &str| if names.contains(&word) { name == word } else { name.contains(word) };
    let fitting: Vec<_> =
        names.iter().copied().filter(|name| only.iter().any(|word| fits(word, name))).collect();
    if fitting.is_empty() { names.to_vec() } else { fitting }
}

impl Plan {
    pub fn new(arguments: &Arguments) -> Result<Self> {
        let (time, rounds) = arguments.common.times((1.0, 5), (0.05, 1))?;
        let servers = SERVERS.map(|server| server.name);
        let steps: Vec<_> = WORKLOADS.iter().map(|workload| workload.name).chain(EXTRA).collect();
        for word in &arguments.only {
            if !servers.iter().chain(&steps).any(|name| name.contains(word.as_str())) {
                return Err(invalid(format!("'{word}' is in the name of no server and no workload"))
                    .next(format!("servers: {}; workloads: {}", servers.join(", "), steps.join(", "))));
            }
        }
        let (servers, steps) = (chosen(&servers, &arguments.only), chosen(&steps, &arguments.only));
        let dirs = if arguments.dir.is_empty() { usual_dirs() } else { arguments.dir.clone() };
        let mut plan = Self {
            dirs,
            workloads: WORKLOADS.into_iter().filter(|workload| steps.contains(&workload.name)).collect(),
            servers: Vec::new(),
            starts: steps.contains(&EXTRA[0]),
            memory: steps.contains(&EXTRA[1]),
            time,
            warm_up: (time / 4).min(Duration::from_millis(200)),
            rounds,
            quick: arguments.common.quick,
            skipped: Vec::new(),
        };
        let wanted =
            |server: &Server| servers.contains(&server.name) && !(arguments.common.quick && server.polls);
        for server in SERVERS.into_iter().filter(wanted) {
            match server.program() {
                Ok(program) => plan.servers.push((server, program)),
                Err(reason) => plan.skipped.push(Skipped { server: server.name, reason }),
            }
        }
        Ok(plan)
    }

    /// All measurements of a round, workload by workload.
    pub fn pairs(&self) -> impl Iterator<Item = (&Workload, &Server, &Path)> {
        self.workloads.iter().flat_map(move |workload| {
            let able = self.servers.iter().filter(move |(server, _)| server.takes(workload));
            able.map(move |(server, program)| (workload, server, program.as_path()))
        })
    }

    pub fn named(&self, names: &[&str]) -> Vec<Server> {
        let servers = self.servers.iter().map(|(server, _)| *server);
        servers.filter(|server| names.contains(&server.name)).collect()
    }
}

/// Those of [`DIRS`] that are what they are meant for.
fn usual_dirs() -> Vec<PathBuf> {
    let [memory, disk] = DIRS.map(PathBuf::from);
    let is_disk = Site::of(&disk).is_ok_and(|site| !site.in_memory);
    if is_disk { vec![memory, disk] } else { vec![memory] }
}

/// How large images are where `free` bytes are free.
pub fn sizes(quick: bool, in_memory: bool, free: u64) -> Sizes {
    let fresh_space_max = (free / 2).min(if in_memory { FRESH_MEMORY_MAX } else { FRESH_SPACE_MAX });
    if quick {
        return Sizes { full_len: 64 << 20, fresh_len: 4 << 30, fresh_requests_max: 512, fresh_space_max };
    }
    // A run in memory takes no longer for more.
    let fresh_requests_max = if in_memory { 16 << 10 } else { 64 << 10 };
    Sizes { full_len: 1 << 30, fresh_len: FRESH_LEN, fresh_requests_max, fresh_space_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_choose_servers_and_workloads_apart() {
        let only = ["vhost".to_owned(), "q32".to_owned()];
        assert_eq!(chosen(&["tapio-vhost-raw", "nbdkit-file"], &only), ["tapio-vhost-raw"]);
        assert_eq!(chosen(&["read-4k-q1", "write-4k-q32", "start"], &only), ["write-4k-q32"]);
        assert_eq!(chosen(&["a", "b"], &only), ["a", "b"]);
        let whole = ["read-4k-q32".to_owned()];
        assert_eq!(chosen(&["read-4k-q32", "read-4k-q32x2"], &whole), ["read-4k-q32"]);
    }

    #[test]
    fn images_never_take_more_than_half_of_what_is_free() {
        for quick in [false, true] {
            for in_memory in [false, true] {
                assert_eq!(sizes(quick, in_memory, 1 << 30).fresh_space_max, 1 << 29);
                assert!(sizes(quick, in_memory, u64::MAX).fresh_space_max <= FRESH_SPACE_MAX);
            }
        }
        assert_eq!(usual_dirs()[0], Path::new(DIRS[0]));
    }
}
