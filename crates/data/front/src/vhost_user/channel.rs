//! The socket of one connection: whole messages with the descriptors that came along.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use tapio_sys::poll::{self, PollFd, PollFlags};
use tapio_sys::socket;

use super::message::{HEADER_LEN, Header, Message, MessageError, TABLE_REGIONS_MAX};

/// A front end that has begun a message must finish it within this time.
const MESSAGE_MAX: Duration = Duration::from_secs(10);

/// Why a connection ended.
#[derive(Debug)]
pub enum ChannelError {
    /// The other side closed it between two messages.
    Closed,
    /// We were asked to stop.
    Stopped,
    /// The socket failed.
    Io(io::Error),
    /// What came is not a message.
    Message(MessageError),
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the front end closed the connection"),
            Self::Stopped => f.write_str("the server was stopped"),
            Self::Io(error) => write!(f, "the connection failed: {error}"),
            Self::Message(error) => error.fmt(f),
        }
    }
}

impl From<io::Error> for ChannelError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<MessageError> for ChannelError {
    fn from(error: MessageError) -> Self {
        Self::Message(error)
    }
}

/// A connected stream socket that carries messages.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Channel {
    /// Takes over a connected UNIX stream socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Waits for the next message of a front end. Gives up as soon as `stop` becomes readable.
    pub fn receive(&self, stop: BorrowedFd<'_>) -> Result<(Header, Message, Vec<OwnedFd>), ChannelError> {
        let mut fds = Vec::new();
        let mut head = [0; HEADER_LEN];
        self.fill(&mut head, &mut fds, stop, None)?;
        let deadline = Instant::now() + MESSAGE_MAX;
        let header = Header::parse(&head)?;
        let mut payload = vec![0; header.len as usize];
        self.fill(&mut payload, &mut fds, stop, Some(deadline))?;
        let message = Message::parse(header.request, &payload)?;
        message.check_fds(header.request, fds.len())?;
        Ok((header, message, fds))
    }

    /// Waits for the answer of a back end: its header and payload, and the descriptors that came with it.
    #[cfg(feature = "doubles")]
    pub fn receive_reply(
        &self,
        within: Duration,
        stop: BorrowedFd<'_>,
    ) -> Result<(Header, Vec<u8>, Vec<OwnedFd>), ChannelError> {
        let deadline = Some(Instant::now() + within);
        let mut fds = Vec::new();
        let mut head = [0; HEADER_LEN];
        self.fill(&mut head, &mut fds, stop, deadline)?;
        let header = Header::parse(&head)?;
        let mut payload = vec![0; header.len as usize];
        self.fill(&mut payload, &mut fds, stop, deadline)?;
        Ok((header, payload, fds))
    }

    /// Sends one message.
    pub fn send(&self, header: Header, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
        bytes.extend_from_slice(&header.to_bytes());
        bytes.extend_from_slice(payload);
        let mut sent = self.send_some(&bytes, fds)?;
        while sent < bytes.len() {
            sent += self.send_some(&bytes[sent..], &[])?;
        }
        Ok(())
    }

    fn fill(
        &self,
        into: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        stop: BorrowedFd<'_>,
        deadline: Option<Instant>,
    ) -> Result<(), ChannelError> {
        let mut done = 0;
        while done < into.len() {
            // A peer that sends a header byte by byte is held to the same time as one that withholds the payload.
            let until =
                if done > 0 && deadline.is_none() { Some(Instant::now() + MESSAGE_MAX) } else { deadline };
            self.wait(stop, until)?;
            match self.recv_some(&mut into[done..], fds)? {
                0 if done == 0 && deadline.is_none() => return Err(ChannelError::Closed),
                0 => {
                    return Err(
                        io::Error::new(io::ErrorKind::UnexpectedEof, "closed inside a message").into()
                    );
                }
                count => done += count,
            }
        }
        Ok(())
    }

    fn wait(&self, stop: BorrowedFd<'_>, deadline: Option<Instant>) -> Result<(), ChannelError> {
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                let why = "the other side did not finish its message in time";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why).into());
            }
            let mut polled =
                [PollFd::new(&self.socket, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
            match poll::any(&mut polled, left) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            };
            if !polled[1].revents().is_empty() {
                return Err(ChannelError::Stopped);
            }
            if !polled[0].revents().is_empty() {
                return Ok(());
            }
        }
    }

    fn recv_some(&self, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, ChannelError> {
        let got = match socket::receive(&self.socket, into, fds) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(ChannelError::Closed),
            got => got?,
        };
        if got.is_cut || fds.len() > TABLE_REGIONS_MAX {
            let why = "more descriptors came with a message than any message has";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why).into());
        }
        Ok(got.len)
    }

    fn send_some(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        loop {
            match socket::send(&self.socket, bytes, fds) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll::any(&mut [PollFd::new(&self.socket, PollFlags::OUT)], None)?;
                }
                sent => return sent,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::id;
    use super::*;
    use std::os::unix::net::UnixStream;

    fn pair() -> (Channel, Channel, UnixStream, UnixStream) {
        let (a, b) = UnixStream::pair().unwrap();
        let (stop, keep) = UnixStream::pair().unwrap();
        (Channel::new(a.into()), Channel::new(b.into()), stop, keep)
    }

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (front, back, stop, _keep) = pair();
        let file = std::fs::File::open("/dev/null").unwrap();
        let header = Header::request(id::SET_VRING_KICK, 8, false);
        front.send(header, &1u64.to_ne_bytes(), &[file.as_fd()]).unwrap();
        let (got, message, fds) = back.receive(stop.as_fd()).unwrap();
        assert_eq!(got, header);
        assert_eq!(message, Message::SetVringKick { index: 1, has_fd: true });
        assert_eq!(fds.len(), 1);
    }

    #[test]
    fn a_close_between_messages_is_clean_and_one_inside_is_not() {
        let (front, back, stop, _keep) = pair();
        drop(front);
        assert!(matches!(back.receive(stop.as_fd()), Err(ChannelError::Closed)));
        let (front, back, stop, _keep) = pair();
        front.send(Header::request(id::SET_FEATURES, 8, false), &[1, 2], &[]).unwrap();
        drop(front);
        assert!(matches!(back.receive(stop.as_fd()), Err(ChannelError::Io(_))));
    }

    #[test]
    fn stopping_ends_the_wait() {
        let (_front, back, stop, keep) = pair();
        drop(keep);
        assert!(matches!(back.receive(stop.as_fd()), Err(ChannelError::Stopped)));
    }

    #[test]
    fn too_many_descriptors_are_refused_and_closed() {
        let (front, back, stop, _keep) = pair();
        let (probe, other) = UnixStream::pair().unwrap();
        let header = Header::request(id::SET_VRING_KICK, 8, false);
        front.send(header, &0u64.to_ne_bytes(), &[other.as_fd(); 2]).unwrap();
        assert!(matches!(back.receive(stop.as_fd()), Err(ChannelError::Message(_))));
        drop(other);
        // Every copy is closed: the other end sees the end of the stream.
        let mut byte = [0];
        assert_eq!(std::io::Read::read(&mut (&probe), &mut byte).unwrap(), 0);
    }
}
