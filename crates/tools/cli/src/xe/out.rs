//! Where output goes, and where files of the user are: here, or at a client of XenServer's own `xe` for which this
//! process runs a command.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use tapio_model::thin::{self, Command, MESSAGE_LEN_MAX, Reply};

/// What is done with the user's terminal or files; a failure is a sentence.
pub type Result<T> = std::result::Result<T, String>;

/// Longest file whose text becomes a parameter.
const TEXT_LEN_MAX: usize = 1 << 20;

thread_local! {
    static CLIENT: RefCell<Option<Thin>> = const { RefCell::new(None) };
}

/// A client that runs what this process tells it.
#[derive(Debug)]
pub struct Thin {
    stream: UnixStream,
}

fn lost(error: &std::io::Error) -> String {
    format!("the connection to the client was lost: {error}")
}

impl Thin {
    /// A connection on which both sides have said hello.
    pub const fn new(stream: UnixStream) -> Self {
        Self { stream }
    }

    fn tell(&mut self, command: Command<'_>) -> Result<()> {
        self.stream.write_all(&command.message()).map_err(|error| lost(&error))
    }

    /// The next reply that is more than a sign of life.
    fn reply(&mut self) -> Result<Reply> {
        loop {
            let mut len = [0; 4];
            self.stream.read_exact(&mut len).map_err(|error| lost(&error))?;
            let len = usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX);
            if len > MESSAGE_LEN_MAX {
                return Err(format!("the client sent a message of {len} bytes"));
            }
            let mut payload = vec![0; len];
            self.stream.read_exact(&mut payload).map_err(|error| lost(&error))?;
            match thin::reply(&payload)? {
                Reply::Wait => {}
                reply => return Ok(reply),
            }
        }
    }

    /// The text of a file of the client's.
    fn load(&mut self, path: &str) -> Result<String> {
        self.tell(Command::Load(path))?;
        if self.reply()? != Reply::Ok {
            return Err(format!("the client cannot read {path}"));
        }
        let mut bytes = Vec::new();
        loop {
            match self.reply()? {
                Reply::Chunk(len) => {
                    let (start, len) = (bytes.len(), usize::try_from(len).unwrap_or(usize::MAX));
                    if start.saturating_add(len) > TEXT_LEN_MAX {
                        return Err(format!("{path}: {len} bytes are no parameter; {TEXT_LEN_MAX} may be"));
                    }
                    bytes.resize(start + len, 0);
                    self.stream.read_exact(&mut bytes[start..]).map_err(|error| lost(&error))?;
                }
                Reply::End => break,
                reply => return Err(format!("the client sent {reply:?} in the middle of {path}")),
            }
        }
        String::from_utf8(bytes).map_err(|_| format!("{path} is no text"))
    }

    fn transfer(&mut self, command: Command<'_>) -> Result<bool> {
        self.tell(command)?;
        Ok(self.reply()? == Reply::Ok)
    }
}

/// Lets the output of this thread go to a client from now on.
pub fn serve(client: Thin) {
    CLIENT.with(|here| *here.borrow_mut() = Some(client));
}

/// Whether this process runs a command for a client of another kind.
pub fn is_served() -> bool {
    CLIENT.with(|here| here.borrow().is_some())
}

/// Does something with the client; none where there is none.
fn with<T>(what: impl FnOnce(&mut Thin) -> T) -> Option<T> {
    CLIENT.with(|here| here.borrow_mut().as_mut().map(what))
}

/// Writes to standard output.
pub fn print(text: &str) -> Result<()> {
    // That client ends every text with a line's end of its own.
    let said = with(|client| client.tell(Command::Print(text.strip_suffix('\n').unwrap_or(text))));
    said.unwrap_or_else(|| tapio_report::failure::print(text).map_err(|error| error.to_string()))
}

/// Writes to standard error.
pub fn complain(text: &str) {
    match with(|client| client.tell(Command::PrintStderr(text))) {
        // A client that is gone misses it.
        Some(said) => drop(said),
        None => tapio_report::failure::complain(text),
    }
}

/// Lets the client end.
pub fn exit(status: u32) {
    drop(with(|client| client.tell(Command::Exit(status))));
}

/// The text of a file of the user.
///
/// # Errors
/// It cannot be read, is no text or longer than a parameter may be.
pub fn text_of(path: &str) -> Result<String> {
    let here = || std::fs::read_to_string(path).map_err(|error| format!("reading {path}: {error}"));
    with(|client| client.load(path)).unwrap_or_else(here)
}

/// Lets the client fetch a path of the server into a file; whether it could.
///
/// # Errors
/// It is gone.
pub fn fetch(file: &str, path: &str) -> Result<bool> {
    with(|client| client.transfer(Command::HttpGet { file, path })).unwrap_or(Ok(false))
}

/// Lets the client send a file to a path of the server; whether it could.
///
/// # Errors
/// It is gone.
pub fn put(file: &str, path: &str) -> Result<bool> {
    with(|client| client.transfer(Command::HttpPut { file, path })).unwrap_or(Ok(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(all: &[u32]) -> Vec<u8> {
        let len = u32::try_from(4 * all.len()).expect("short");
        [len].iter().chain(all).flat_map(|number| number.to_le_bytes()).collect()
    }

    /// What the client said before it was asked, and what it was told.
    fn talk(said: &[Vec<u8>], what: impl FnOnce(&mut Thin) -> Result<String>) -> (Result<String>, Vec<u8>) {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        theirs.write_all(&said.concat()).expect("sent");
        theirs.shutdown(std::net::Shutdown::Write).expect("ended");
        let mut client = Thin::new(ours);
        let answer = what(&mut client);
        drop(client);
        let mut told = Vec::new();
        theirs.read_to_end(&mut told).expect("read");
        (answer, told)
    }

    #[test]
    fn a_file_of_the_client_comes_in_pieces_and_bounded() {
        let load = |client: &mut Thin| client.load("/x");
        let good =
            [number(&[10, 18]), number(&[10, 5]), number(&[11, 7, 2]), b"ab".to_vec(), number(&[11, 8])];
        let (answer, told) = talk(&good, load);
        assert_eq!(answer.as_deref(), Ok("ab"));
        assert_eq!(told, Command::Load("/x").message());
        for (said, why) in [
            (vec![number(&[10, 6])], "cannot read /x"),
            (vec![number(&[10, 5]), number(&[11, 7, u32::MAX])], "are no parameter"),
            (vec![number(&[10, 5]), number(&[11, 7, 1]), vec![0xff], number(&[11, 8])], "is no text"),
            (vec![number(&[10, 5]), number(&[10, 6])], "in the middle of /x"),
            (vec![vec![0xff; 4]], "a message of 4294967295 bytes"),
            (vec![], "connection to the client was lost"),
        ] {
            let (answer, _) = talk(&said, load);
            assert!(answer.as_ref().is_err_and(|text| text.contains(why)), "{answer:?}");
        }
    }
}
