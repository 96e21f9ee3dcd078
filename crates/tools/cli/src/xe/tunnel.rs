//! A connection to the server that carries bytes of something else: a console.

use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;

use super::client::Client;
use super::error::{Failure, Result};

/// Longest text of a refusal that is shown.
const WHY_LEN_MAX: usize = 4096;

/// Asks for `path`, whose query has begun, by CONNECT; a socket that carries what the server sends and takes from then
/// on.
///
/// # Errors
/// The server cannot be reached, or refuses: in its words.
pub(super) fn tunnel(client: &Client, path: &str) -> Result<UnixStream> {
    let told = |error: std::io::Error| Failure::other(format!("a socket for a console: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(told)?;
    theirs.set_nonblocking(true).map_err(told)?;
    let (tell, answer) = mpsc::channel();
    let (own, path) = (client.again()?, path.to_owned());
    // It ends when one end of the tunnel does, or with the program.
    std::thread::spawn(move || {
        own.wait(async {
            let mut upgraded = match upgraded(&own, &path).await {
                Ok(upgraded) => upgraded,
                Err(error) => return drop(tell.send(Err(error))),
            };
            let Ok(mut theirs) = tokio::net::UnixStream::from_std(theirs) else { return };
            drop(tell.send(Ok(())));
            let _ = tokio::io::copy_bidirectional(&mut upgraded, &mut theirs).await;
        });
    });
    answer.recv().unwrap_or_else(|_| Err(Failure::other("the console's connection ended")))?;
    Ok(ours)
}

async fn upgraded(client: &Client, path: &str) -> Result<TokioIo<hyper::upgrade::Upgraded>> {
    let asked = client.http(Method::CONNECT, path, &[], Empty::<Bytes>::new()).await?;
    let mut answer = asked.map_err(|error| Failure::other(format!("{path}: {error}")))?;
    if answer.status() != StatusCode::OK {
        let mut text = Vec::new();
        while let Some(Ok(frame)) = answer.frame().await {
            text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            if text.len() > WHY_LEN_MAX {
                break;
            }
        }
        text.truncate(WHY_LEN_MAX);
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        return Err(Failure::other(format!("{}: {text}", answer.status())));
    }
    let upgraded = hyper::upgrade::on(answer).await;
    upgraded.map(TokioIo::new).map_err(|error| Failure::other(format!("{path}: {error}")))
}
