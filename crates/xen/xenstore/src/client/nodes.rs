//! What can be done with nodes, in a transaction and without.

use super::{Answer, XsError};
use crate::wire::{Errno, MessageKind, Permission, Request, decimal, reply};

/// Bytes of all names of a node's children, at most: a hundred thousand long ones.
const DIRECTORY_LEN_MAX: usize = 16 << 20;
/// How often a long directory that changes while it is read is begun again.
const DIRECTORY_TRIES_MAX: u32 = 100;

/// Reading and writing nodes. A node that is not there is `None`, never an error.
pub trait Nodes: Sized {
    /// Sends requests together and gives their answers in order. The methods below are made of it.
    ///
    /// # Errors
    /// The connection failed. Refusals are answers.
    fn ask(&mut self, requests: &[Request<'_>]) -> Result<Vec<Answer>, XsError>;

    /// Does several things, all sent together: in a transaction a whole change is one round trip.
    ///
    /// # Errors
    /// The first that was refused. Outside of a transaction the others were done all the same.
    fn do_all(&mut self, requests: &[Request<'_>]) -> Result<(), XsError> {
        let answers = self.ask(requests)?;
        for (request, answer) in requests.iter().zip(answers) {
            answer.map_err(|errno| XsError::refused(errno, request))?;
        }
        Ok(())
    }

    /// A node's value.
    ///
    /// # Errors
    /// The daemon refuses.
    fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, XsError> {
        Ok(self.read_many(&[path])?.pop().flatten())
    }

    /// The values of several nodes, by one round trip.
    ///
    /// # Errors
    /// The daemon refuses one of them.
    fn read_many<P: AsRef<str>>(&mut self, paths: &[P]) -> Result<Vec<Option<Vec<u8>>>, XsError> {
        let requests: Vec<_> = paths.iter().map(|path| Request::Read { path: path.as_ref() }).collect();
        let answers = self.ask(&requests)?;
        requests.iter().zip(answers).map(|(request, answer)| there(request, answer)).collect()
    }

    /// A node's value as text.
    ///
    /// # Errors
    /// The daemon refuses, or it is no UTF-8.
    fn read_text(&mut self, path: &str) -> Result<Option<String>, XsError> {
        self.read(path)?
            .map(|bytes| {
                String::from_utf8(bytes)
                    .map_err(|_| XsError::Value { path: path.into(), why: "does not hold text".into() })
            })
            .transpose()
    }

    /// A node's value as a decimal number.
    ///
    /// # Errors
    /// The daemon refuses, or it is no number.
    fn read_u64(&mut self, path: &str) -> Result<Option<u64>, XsError> {
        self.read(path)?
            .map(|bytes| {
                decimal(&bytes).ok_or_else(|| {
                    let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
                    let why = format!("holds '{}', which is no number", shown.escape_default());
                    XsError::Value { path: path.into(), why }
                })
            })
            .transpose()
    }

    /// The names of a node's children, however many there are.
    ///
    /// # Errors
    /// The daemon refuses.
    fn directory(&mut self, path: &str) -> Result<Option<Vec<String>>, XsError> {
        Ok(self.directory_many(&[path])?.pop().flatten())
    }

    /// The children of several nodes, by one round trip where none has very many.
    ///
    /// # Errors
    /// The daemon refuses one of them.
    fn directory_many<P: AsRef<str>>(&mut self, paths: &[P]) -> Result<Vec<Option<Vec<String>>>, XsError> {
        let requests: Vec<_> = paths.iter().map(|path| Request::Directory { path: path.as_ref() }).collect();
        let answers = self.ask(&requests)?;
        let mut found = Vec::with_capacity(answers.len());
        for (request, answer) in requests.iter().zip(answers) {
            found.push(match (answer, request) {
                (Err(Errno::E2BIG), Request::Directory { path }) => long_directory(self, path)?,
                (answer, _) => there(request, answer)?
                    .map(|payload| reply::read_strings(MessageKind::Directory, &payload))
                    .transpose()?,
            });
        }
        Ok(found)
    }

    /// Sets a value; makes the node, and those above it, where they are not there.
    ///
    /// # Errors
    /// The daemon refuses.
    fn write(&mut self, path: &str, value: impl AsRef<[u8]>) -> Result<(), XsError> {
        self.do_all(&[Request::Write { path, value: value.as_ref() }])
    }

    /// Sets several values by one round trip.
    ///
    /// # Errors
    /// The daemon refuses one of them.
    fn write_many<P: AsRef<str>, V: AsRef<[u8]>>(&mut self, values: &[(P, V)]) -> Result<(), XsError> {
        let requests: Vec<_> = values
            .iter()
            .map(|(path, value)| Request::Write { path: path.as_ref(), value: value.as_ref() })
            .collect();
        self.do_all(&requests)
    }

    /// Makes a node with an empty value; one that is there stays as it is.
    ///
    /// # Errors
    /// The daemon refuses.
    fn mkdir(&mut self, path: &str) -> Result<(), XsError> {
        self.do_all(&[Request::Mkdir { path }])
    }

    /// Removes a node and all below it; one that is not there is removed already.
    ///
    /// # Errors
    /// The daemon refuses.
    fn remove(&mut self, path: &str) -> Result<(), XsError> {
        match self.do_all(&[Request::Rm { path }]) {
            Err(XsError::Refused { errno: Errno::ENOENT, .. }) => Ok(()),
            done => done,
        }
    }

    /// The domains that may read and write a node; the first is the owner.
    ///
    /// # Errors
    /// The daemon refuses.
    fn permissions(&mut self, path: &str) -> Result<Option<Vec<Permission>>, XsError> {
        let request = Request::GetPerms { path };
        let answer = self.ask(std::slice::from_ref(&request))?.pop().unwrap_or(Err(Errno::EIO));
        Ok(there(&request, answer)?.map(|payload| reply::read_permissions(&payload)).transpose()?)
    }

    /// Sets the domains that may read and write a node; the first is the owner.
    ///
    /// # Errors
    /// The daemon refuses.
    fn set_permissions(&mut self, path: &str, permissions: &[Permission]) -> Result<(), XsError> {
        self.do_all(&[Request::SetPerms { path, permissions: permissions.to_vec() }])
    }
}

/// What a node holds, or that it is not there.
fn there(request: &Request<'_>, answer: Answer) -> Result<Option<Vec<u8>>, XsError> {
    match answer {
        Ok(payload) => Ok(Some(payload)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(XsError::refused(errno, request)),
    }
}

/// Children that are more than fit into a message, part by part. Outside of a transaction the list may change
/// meanwhile; then it is read again from the start.
fn long_directory<N: Nodes>(nodes: &mut N, path: &str) -> Result<Option<Vec<String>>, XsError> {
    let (mut names, mut seen) = (Vec::new(), Vec::new());
    let mut tries = 0;
    loop {
        let request = Request::DirectoryPart { path, offset: names.len() as u32 };
        let answer = nodes.ask(std::slice::from_ref(&request))?.pop().unwrap_or(Err(Errno::EIO));
        let Some(payload) = there(&request, answer)? else { return Ok(None) };
        let (generation, part, last) = reply::read_directory_part(&payload)?;
        if !names.is_empty() && generation != seen {
            tries += 1;
            if tries > DIRECTORY_TRIES_MAX {
                return Err(XsError::Contended { tries });
            }
            names.clear();
            continue;
        }
        seen = generation.to_vec();
        names.extend_from_slice(part);
        if names.len() > DIRECTORY_LEN_MAX {
            return Err(XsError::Value { path: path.into(), why: "has too many children".into() });
        }
        if last {
            return Ok(Some(reply::read_strings(MessageKind::DirectoryPart, &names)?));
        }
        if part.is_empty() {
            return Err(XsError::Nonsense(format!("a part of the children of {path} is empty")));
        }
    }
}
