//! A connection that cannot be held open by doing nothing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Where a connection stands: counts up when a request's head is complete and when its answer is. Odd while a request
/// is at work; then the client may be silent.
#[derive(Debug, Default)]
pub(super) struct Phase(AtomicU32);

impl Phase {
    pub(super) fn step(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn now(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

type Alarm = Option<Pin<Box<Sleep>>>;

/// A stream that ends when a request's head takes too long, or when the client takes nothing of what it is sent.
#[derive(Debug)]
pub(super) struct Guarded<S> {
    stream: S,
    phase: Arc<Phase>,
    seen: u32,
    head_time: Duration,
    write_time: Duration,
    head: Alarm,
    write: Alarm,
}

impl<S> Guarded<S> {
    /// The first head has to begin at once; between two requests the server's idle time counts.
    pub(super) fn new(stream: S, phase: Arc<Phase>, head_time: Duration, write_time: Duration) -> Self {
        let head = Some(Box::pin(tokio::time::sleep(head_time)));
        Self { stream, phase, seen: 0, head_time, write_time, head, write: None }
    }
}

fn rings(alarm: &mut Alarm, cx: &mut Context<'_>, what: &'static str) -> Poll<io::Result<()>> {
    let Some(alarm) = alarm else { return Poll::Pending };
    alarm.as_mut().poll(cx).map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, what)))
}

impl<S> Guarded<S> {
    /// What a write came to, with the alarm set while it comes to nothing.
    fn wrote<T>(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.write = None;
            return done;
        }
        let time = self.write_time;
        self.write.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + time)));
        match rings(&mut self.write, cx, "the client takes nothing of its answer") {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let now = this.phase.now();
        if now != this.seen {
            (this.seen, this.head) = (now, None);
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Ready(result) => {
                let came = buf.filled().len() > before;
                if came && now.is_multiple_of(2) && this.head.is_none() {
                    this.head = Some(Box::pin(tokio::time::sleep(this.head_time)));
                }
                Poll::Ready(result)
            }
            Poll::Pending => rings(&mut this.head, cx, "the request's head is not complete in time"),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.wrote(cx, done)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.wrote(cx, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_flush(cx);
        this.wrote(cx, done)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let done = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.wrote(cx, done)
    }
}
