//! `tapio disk transfers`: how a disk's requests go to its storage.

use clap::Args;
use tapio_control::command as ask;
use tapio_control::{ControlError, Errno, RunDir};
use tapio_report::failure::{Result, print, print_json};
use tapio_types::TransferSizes;

use super::REPLY_TIMEOUT;
use super::limit::find;

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  tapio disk transfers 3                              show
  tapio disk transfers 3 --split 64KiB                long requests as pieces of 64 KiB, up to 16 at a time
  tapio disk transfers 3 --merge 256KiB               neighbours that come at the same time as one
  tapio disk transfers 3 --off

Splitting helps where a storage serves several requests beside each other and each takes the longer the larger it is:
stripes, arrays behind a network, several connections. Merging helps where each request costs time of its own and few
are served at a time. Where seeks dominate, neither does. 'tapio profile' measures a storage and says what suits it.

What is given replaces all that was there before, from the next request on. For disks of a VM, set split-size and
merge-size in other-config of the VBD or the SR: a plug goes by those.")]
pub struct TransfersArguments {
    /// Minor number
    minor: u16,
    /// Process; needed only where several have a disk of that number
    #[arg(short, long)]
    pid: Option<i32>,
    /// Longer requests go as pieces of this size: a multiple of 4 KiB up to 32 MiB
    #[arg(long, value_name = "SIZE")]
    split: Option<String>,
    /// Neighbouring requests go as one up to this size: likewise, and not more than --split
    #[arg(long, value_name = "SIZE")]
    merge: Option<String>,
    /// As guests send them
    #[arg(long, conflicts_with_all = ["split", "merge"])]
    off: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

impl TransfersArguments {
    /// The sizes to set; `None` when they are only to be shown.
    fn sizes(&self) -> Result<Option<TransferSizes>> {
        let invalid = |why: String| ControlError::new(Errno::EINVAL, why);
        let (mut sizes, mut any) = (TransferSizes::default(), self.off);
        for (name, value) in [("split", &self.split), ("merge", &self.merge)] {
            if let Some(value) = value {
                sizes.set(name, value).map_err(|why| invalid(format!("--{name} {why}")))?;
                any = true;
            }
        }
        sizes.check().map_err(invalid)?;
        Ok(any.then_some(sizes))
    }
}

pub fn run(run: &RunDir, arguments: &TransfersArguments) -> Result<()> {
    let minor = arguments.minor;
    let sizes = arguments.sizes()?;
    let mut client = find(run, minor, arguments.pid)?;
    if let Some(sizes) = sizes {
        client.call(&ask::SetTransfers { minor, sizes }, &[], REPLY_TIMEOUT)?;
    }
    let report = client.call(&ask::Limits { minor }, &[], REPLY_TIMEOUT)?;
    if arguments.json {
        return print_json(&report.transfers);
    }
    print(&format!("transfers: {}\n", report.transfers))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: TransfersArguments,
    }

    fn sizes(line: &str) -> Result<Option<TransferSizes>> {
        let words = std::iter::once("transfers").chain(line.split_whitespace());
        Line::try_parse_from(words).expect(line).arguments.sizes()
    }

    #[test]
    fn what_is_given_is_set_and_nothing_given_shows() {
        assert_eq!(sizes("3"), Ok(None));
        assert_eq!(sizes("3 --off"), Ok(Some(TransferSizes::default())));
        let given = TransferSizes { split: 1 << 20, merge: 65_536 };
        assert_eq!(sizes("3 --split 1MiB --merge 64KiB"), Ok(Some(given)));
        for line in ["3 --split 1000", "3 --merge much", "3 --split 4KiB --merge 8KiB"] {
            assert_eq!(sizes(line).expect_err(line).errno, Errno::EINVAL);
        }
    }
}
