//! The protocol of XenServer's own `xe`: the server runs the command, and tells the client what to print, which file to
//! read, from where to fetch another.
//!
//! ```text
//! client: POST /cli HTTP/1.0, content-length, a line for each word     server: PREFIX major minor
//! client: PREFIX major minor                                           server: messages, the client answers some
//! ```
//!
//! A message is its length and its payload. All numbers have 32 bits, the lowest byte first.

/// What both sides begin with.
pub const PREFIX: &[u8] = b"XenSource thin CLI protocol";

/// Version of the protocol.
pub const VERSION: (u32, u32) = (0, 2);

/// Bytes of what a side begins with.
pub const HELLO_LEN: usize = PREFIX.len() + 8;

/// Longest message of a client: a tag and a number or two. The contents of files follow a message and are none.
pub const MESSAGE_LEN_MAX: usize = 64;

/// Longest text of words that a client may send, in bytes.
pub const WORDS_LEN_MAX: usize = 64 << 10;

/// Words in it.
pub const WORDS_MAX: usize = 1024;

/// What the server asks the client to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Print this, and the end of a line after it.
    Print(&'a str),
    /// Print this on standard error, as it is.
    PrintStderr(&'a str),
    /// Send the contents of a file: `Ok` and a blob, or `Failed`.
    Load(&'a str),
    /// Ask the server for a path, and write what comes into a file: `Ok` or `Failed`, after any number of `Wait`.
    HttpGet {
        /// The file.
        file: &'a str,
        /// What to ask for.
        path: &'a str,
    },
    /// Send a file to a path of the server, after its answer: `Ok` or `Failed`, after any number of `Wait`.
    HttpPut {
        /// The file.
        file: &'a str,
        /// Where to send it.
        path: &'a str,
    },
    /// End with this status.
    Exit(u32),
}

/// What the client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It is done.
    Ok,
    /// It is being done.
    Wait,
    /// It could not be done.
    Failed,
    /// So many bytes follow the message.
    Chunk(u32),
    /// No more bytes follow.
    End,
}

/// What a side begins with.
pub fn hello() -> Vec<u8> {
    let mut bytes = PREFIX.to_vec();
    bytes.extend_from_slice(&VERSION.0.to_le_bytes());
    bytes.extend_from_slice(&VERSION.1.to_le_bytes());
    bytes
}

/// Checks what the other side began with.
///
/// # Errors
/// A sentence: it is no thin CLI, or one of another major version.
pub fn check_hello(bytes: &[u8]) -> Result<(), String> {
    let version = bytes.strip_prefix(PREFIX).and_then(|rest| rest.first_chunk::<4>());
    match version.map(|major| u32::from_le_bytes(*major)) {
        Some(major) if major == VERSION.0 => Ok(()),
        Some(major) => {
            Err(format!("the client speaks version {major} of the thin CLI protocol, not {}", VERSION.0))
        }
        None => Err("the client does not speak the thin CLI protocol".to_owned()),
    }
}

impl Command<'_> {
    /// The message, its length in front. A text longer than 4 GiB is cut there.
    pub fn message(&self) -> Vec<u8> {
        let (tag, texts, number): (u32, &[&str], Option<u32>) = match self {
            Self::Print(text) => (0, &[*text], None),
            Self::Load(file) => (1, &[*file], None),
            Self::Exit(status) => (4, &[], Some(*status)),
            Self::HttpGet { file, path } => (12, &[*file, *path], None),
            Self::HttpPut { file, path } => (13, &[*file, *path], None),
            Self::PrintStderr(text) => (16, &[*text], None),
        };
        // 9: a command.
        let mut payload = [9_u32.to_le_bytes(), tag.to_le_bytes()].concat();
        for text in texts {
            let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
            payload.extend_from_slice(&len.to_le_bytes());
            payload.extend_from_slice(&text.as_bytes()[..len as usize]);
        }
        payload.extend(number.into_iter().flat_map(u32::to_le_bytes));
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let mut message = len.to_le_bytes().to_vec();
        message.append(&mut payload);
        message
    }
}

/// Reads the payload of a client's message.
///
/// # Errors
/// A sentence: it is none that a client sends.
pub fn reply(payload: &[u8]) -> Result<Reply, String> {
    let mut numbers =
        payload.chunks_exact(4).map(|bytes| bytes.try_into().map(u32::from_le_bytes).unwrap_or_default());
    let wrong = || format!("the client sent a message of {} bytes that is no reply", payload.len());
    if !payload.len().is_multiple_of(4) {
        return Err(wrong());
    }
    let all = [numbers.next(), numbers.next(), numbers.next(), numbers.next()];
    match all {
        [Some(10), Some(5), None, _] => Ok(Reply::Ok),
        [Some(10), Some(18), None, _] => Ok(Reply::Wait),
        [Some(10), Some(6), None, _] => Ok(Reply::Failed),
        [Some(11), Some(7), Some(len), None] => Ok(Reply::Chunk(len)),
        [Some(11), Some(8), None, _] => Ok(Reply::End),
        _ => Err(wrong()),
    }
}

/// The words that a client sent.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Words {
    /// The account, and its password: never among the words.
    pub user: Option<String>,
    /// Its password.
    pub password: Option<String>,
    /// The command and its parameters.
    pub words: Vec<String>,
}

impl std::fmt::Debug for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // No secrets; parameters may be some, too.
        f.debug_struct("Words").field("command", &self.words.first()).finish_non_exhaustive()
    }
}

/// Reads the body of `POST /cli`: a word a line.
///
/// # Errors
/// A sentence: it is too long, or no text.
pub fn words(body: &[u8]) -> Result<Words, String> {
    if body.len() > WORDS_LEN_MAX {
        return Err(format!("a command may have {WORDS_LEN_MAX} bytes"));
    }
    let text = std::str::from_utf8(body).map_err(|_| "a command is UTF-8".to_owned())?;
    if text.contains('\0') {
        return Err("a command has no bytes of zero".to_owned());
    }
    let mut all = Words::default();
    for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
        match line.split_once('=') {
            Some(("username", user)) => all.user = Some(user.to_owned()),
            Some(("password", password)) => all.password = Some(password.to_owned()),
            _ => all.words.push(line.to_owned()),
        }
        if all.words.len() > WORDS_MAX {
            return Err(format!("a command may have {WORDS_MAX} words"));
        }
    }
    Ok(all)
}

/// The length of the body, from the head of the request.
///
/// # Errors
/// A sentence: there is none, or it is no number.
pub fn body_len(head: &[u8]) -> Result<usize, String> {
    let text = String::from_utf8_lossy(head);
    let lens = text.lines().skip(1).filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>())
    });
    let lens: Vec<_> = lens.collect();
    match lens.as_slice() {
        [Ok(len)] if *len <= WORDS_LEN_MAX => Ok(*len),
        [Ok(_)] => Err(format!("a command may have {WORDS_LEN_MAX} bytes")),
        _ => Err("POST /cli wants one content-length".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_those_of_the_protocol() {
        assert_eq!(
            Command::Print("ab").message(),
            [14, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, b'a', b'b']
        );
        assert_eq!(Command::Exit(1).message(), [12, 0, 0, 0, 9, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0]);
        let get = Command::HttpGet { file: "f", path: "/p" }.message();
        assert_eq!(get[4..], [9, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, b'f', 2, 0, 0, 0, b'/', b'p']);
        assert_eq!(hello().len(), HELLO_LEN);
        assert_eq!(check_hello(&hello()), Ok(()));
        assert!(check_hello(b"HTTP/1.1 200 OK").expect_err("HTTP").contains("does not speak"));
        let mut other = hello();
        other[PREFIX.len()] = 9;
        assert!(check_hello(&other).expect_err("version 9").contains("version 9"));
    }

    #[test]
    fn replies_are_read_and_anything_else_is_refused() {
        let of = |numbers: &[u32]| reply(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
        assert_eq!(of(&[10, 5]), Ok(Reply::Ok));
        assert_eq!(of(&[10, 18]), Ok(Reply::Wait));
        assert_eq!(of(&[10, 6]), Ok(Reply::Failed));
        assert_eq!(of(&[11, 7, 512]), Ok(Reply::Chunk(512)));
        assert_eq!(of(&[11, 8]), Ok(Reply::End));
        for wrong in [&[][..], &[10], &[10, 7], &[10, 5, 0], &[9, 0, 0], &[11, 7], &[11, 7, 1, 1]] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
        assert!(reply(&[10, 0, 0, 0, 5]).is_err());
    }

    #[test]
    fn words_are_lines_and_passwords_are_none_of_them() {
        let read = words(b"username=joe\npassword=a=b\nvdi-list\nuuid=1\n\n").expect("good");
        assert_eq!((read.user.as_deref(), read.password.as_deref()), (Some("joe"), Some("a=b")));
        assert_eq!(read.words, ["vdi-list", "uuid=1"]);
        assert!(!format!("{read:?}").contains("a=b"));
        assert!(words(&[0xff]).is_err() && words(b"a\0b").is_err());
        assert!(words(&vec![b'a'; WORDS_LEN_MAX + 1]).is_err());
        assert!(words(&b"a\n".repeat(WORDS_MAX + 1)).is_err());
        let len = |head: &str| body_len(head.as_bytes());
        assert_eq!(len("POST /cli HTTP/1.0\r\nContent-Length: 12\r\n\r\n"), Ok(12));
        for bad in
            ["", "content-length: x", "content-length: 1\r\ncontent-length: 2", "content-length: 999999"]
        {
            assert!(len(&format!("POST /cli HTTP/1.0\r\n{bad}\r\n\r\n")).is_err(), "{bad}");
        }
    }
}
