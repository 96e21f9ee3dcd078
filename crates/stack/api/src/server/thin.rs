//! `POST /cli`: the command line of clients that have XenServer's own `xe`.
//!
//! The answer is no HTTP but the protocol of `tapio_model::thin`, so the request is taken before hyper sees it. The
//! command runs in a process of its own, in the client's session; what it and the client say to each other is passed
//! on.
//! A client that goes away ends the process.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tapio_model::thin::{self, Command, Words};
use tapio_model::{ApiError, Value};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::Semaphore;

use super::Shared;
use super::guard::Phase;
use crate::backend::{CommandLines, Peer};

/// What such a request begins with.
const REQUEST: &[u8] = b"POST /cli ";

/// Bytes that are passed on at once.
const PIECE_LEN: usize = 16 << 10;

/// Runs command lines.
pub(super) struct Thin {
    lines: Option<Arc<dyn CommandLines>>,
    places: Arc<Semaphore>,
}

impl Thin {
    pub(super) fn new(lines: Option<Arc<dyn CommandLines>>, max: usize) -> Self {
        Self { lines, places: Arc::new(Semaphore::new(max)) }
    }
}

/// Reads no more than it takes to know whether a connection begins with such a request; what was read is in `front`.
pub(super) async fn is_thin<S: AsyncRead + Unpin>(stream: &mut S, front: &mut Vec<u8>) -> io::Result<bool> {
    let mut bytes = [0; REQUEST.len()];
    while front.len() < REQUEST.len() {
        let read = stream.read(&mut bytes[..REQUEST.len() - front.len()]).await?;
        front.extend_from_slice(&bytes[..read]);
        if read == 0 || !REQUEST.starts_with(front) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A stream of which some bytes were read already.
pub(super) struct Prefixed<S> {
    front: Vec<u8>,
    at: usize,
    stream: S,
}

impl<S> Prefixed<S> {
    pub(super) const fn new(front: Vec<u8>, stream: S) -> Self {
        Self { front, at: 0, stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Prefixed<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let left = this.front.get(this.at..).unwrap_or_default();
        if left.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let count = left.len().min(buf.remaining());
        buf.put_slice(&left[..count]);
        this.at += count;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Prefixed<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

/// The request, and what the client sent behind it.
async fn read<S: AsyncRead + Unpin>(
    stream: &mut S,
    head_len_max: usize,
) -> io::Result<Result<(Words, Vec<u8>), String>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 1024];
    let head_len = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if bytes.len() > head_len_max {
            return Ok(Err(format!("the head of a request may have {head_len_max} bytes")));
        }
        let read = stream.read(&mut piece).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&piece[..read]);
    };
    let len = match thin::body_len(&bytes[..head_len]) {
        Ok(len) => len,
        Err(why) => return Ok(Err(why)),
    };
    while bytes.len() < head_len + len {
        let read = stream.read(&mut piece).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&piece[..read]);
    }
    let behind = bytes.split_off(head_len + len);
    Ok(thin::words(&bytes[head_len..]).map(|words| (words, behind)))
}

/// What is said where a login fails, in the words that users of that `xe` know.
fn refusal(error: &ApiError) -> String {
    if error.code == "SESSION_AUTHENTICATION_FAILED" {
        return "Authentication failed\n".to_owned();
    }
    format!("Error code: {}\nError parameters: {}\n", error.code, error.params.join(", "))
}

async fn refuse<S: AsyncWrite + Unpin>(stream: &mut S, why: &str) -> io::Result<()> {
    stream.write_all(&Command::PrintStderr(why).message()).await?;
    stream.write_all(&Command::Exit(1).message()).await?;
    stream.flush().await
}

impl Shared {
    /// Takes the request and runs its command. An error is the connection's.
    pub(super) async fn command_line<S>(&self, stream: &mut S, peer: &Peer, phase: &Phase) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let limits = &self.http.limits;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the command is not complete in time");
        let reading = read(stream, limits.head_len_max);
        let (words, behind) = match tokio::time::timeout(limits.body_time, reading).await {
            Err(_) => return Err(late()),
            Ok(read) => match read? {
                Ok(read) => read,
                Err(why) => return http(stream, "400 Bad Request", &why).await,
            },
        };
        let Some(lines) = &self.thin.lines else {
            return http(stream, "404 Not Found", "no program runs command lines here").await;
        };
        // From here on the client may be silent: the command works.
        phase.step();
        stream.write_all(&thin::hello()).await?;
        let Ok(place) = Arc::clone(&self.thin.places).try_acquire_owned() else {
            return refuse(stream, "Error: too many commands run at a time; come back in a second\n").await;
        };
        let account = match (words.user, words.password) {
            (Some(user), password) => Some((user, password.unwrap_or_default())),
            (None, _) if peer.superuser => Some(("root".to_owned(), String::new())),
            (None, _) => None,
        };
        let Some((user, password)) = account else {
            return refuse(stream, "Authentication failed\n").await;
        };
        let params = [user, password, "1.0".to_owned(), "xe".to_owned()].map(Value::String);
        let calls = &self.http.calls;
        let login = calls.value(peer, limits, "session.login_with_password", params.to_vec()).await;
        let session = match login {
            Ok(Value::String(session)) => session,
            Ok(_) => return refuse(stream, "Error: a login answers a session\n").await,
            Err(error) => return refuse(stream, &refusal(&error)).await,
        };
        let ended = self.run(stream, Arc::clone(lines), (session.clone(), words.words), &behind).await;
        drop(place);
        let logout = vec![Value::String(session)];
        if let Err(error) = calls.value(peer, limits, "session.logout", logout).await {
            tracing::debug!("{}: {error}", peer.address);
        }
        ended
    }

    async fn run<S>(
        &self,
        stream: &mut S,
        lines: Arc<dyn CommandLines>,
        (session, words): (String, Vec<String>),
        behind: &[u8],
    ) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let begun = tokio::task::spawn_blocking(move || lines.begin(&session, &words)).await;
        let begun = begun.unwrap_or_else(|error| Err(io::Error::other(error)));
        let (program, process) = match begun.and_then(|(program, process)| {
            program.set_nonblocking(true)?;
            Ok((tokio::net::UnixStream::from_std(program)?, process))
        }) {
            Ok(begun) => begun,
            Err(error) => {
                tracing::warn!("a command line could not be run: {error}");
                return refuse(stream, &format!("Error: the command could not be run: {error}\n")).await;
            }
        };
        let passed = pass(stream, program, behind);
        let passed = self.until_end(passed).await.unwrap_or(Ok(()));
        // Its end is waited for, where waiting is allowed.
        let _ = tokio::task::spawn_blocking(move || drop(process)).await;
        passed
    }
}

/// Passes on what both sides send until one of them ends.
async fn pass<S>(stream: &mut S, mut program: tokio::net::UnixStream, behind: &[u8]) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    program.write_all(behind).await?;
    let (mut from_client, mut to_client) = tokio::io::split(stream);
    let (mut from_program, mut to_program) = program.split();
    let out = async {
        let mut piece = vec![0; PIECE_LEN];
        loop {
            match from_program.read(&mut piece).await? {
                0 => return to_client.flush().await,
                read => {
                    to_client.write_all(&piece[..read]).await?;
                    to_client.flush().await?;
                }
            }
        }
    };
    let into = async {
        let mut piece = vec![0; PIECE_LEN];
        loop {
            match from_client.read(&mut piece).await? {
                0 => return Ok(()),
                // The program may have ended; what it said last is on its way.
                read if to_program.write_all(&piece[..read]).await.is_err() => std::future::pending().await,
                _ => {}
            }
        }
    };
    tokio::select! {
        done = out => done,
        done = into => done,
    }
}

async fn http<S: AsyncWrite + Unpin>(stream: &mut S, status: &str, why: &str) -> io::Result<()> {
    let text = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{why}\n",
        why.len() + 1
    );
    stream.write_all(text.as_bytes()).await?;
    stream.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn other_requests_lose_no_byte() {
        for (sent, is) in
            [("POST /cli HTTP/1.0", true), ("POST / HTTP/1.1", false), ("GET", false), ("", false)]
        {
            let mut front = Vec::new();
            let mut stream = sent.as_bytes();
            assert_eq!(is_thin(&mut stream, &mut front).await.expect("read"), is, "{sent}");
            let mut all = String::new();
            Prefixed::new(front, stream).read_to_string(&mut all).await.expect("read");
            assert_eq!(all, sent);
        }
    }

    #[tokio::test]
    async fn requests_are_bounded_and_what_follows_them_is_kept() {
        let sent = b"POST /cli HTTP/1.0\r\ncontent-length: 9\r\n\r\nvm-list\nXXenSource";
        let (words, behind) = read(&mut &sent[..], 1024).await.expect("read").expect("good");
        assert_eq!(words.words, ["vm-list", "X"]);
        assert_eq!(behind, b"XenSource");
        let long = vec![b'x'; 4096];
        assert!(read(&mut &long[..], 1024).await.expect("read").is_err());
        let error = read(&mut &b"POST /cli HTTP/1.0\r\n"[..], 1024).await.expect_err("cut off");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
