//! The toolstack behind its doors: what `api` asks for, in `core`'s terms.

use std::sync::Arc;

use tapio_api::accounts::Accounts;
use tapio_api::door::{BoxFuture, Door, Peer};
use tapio_core::Toolstack;
use tapio_model::{ApiError, Role, Value};

use crate::memory::Trimmer;

/// The toolstack as a door leads to it.
pub struct Desk {
    pub stack: Arc<Toolstack>,
    pub trimmer: Trimmer,
}

fn to_core(peer: &Peer) -> tapio_core::Peer {
    tapio_core::Peer { superuser: peer.superuser, address: peer.address.clone() }
}

impl Door for Desk {
    fn call(&self, peer: &Peer, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        let answer = self.stack.call(&to_core(peer), method, params)?;
        self.trimmer.saw(&answer);
        Ok(answer)
    }

    fn wait(
        &self,
        peer: &Peer,
        method: &str,
        params: &mut Vec<Value>,
    ) -> Option<BoxFuture<Result<Value, ApiError>>> {
        if !Toolstack::waits(method) {
            return None;
        }
        let (stack, trimmer) = (Arc::clone(&self.stack), self.trimmer.clone());
        let (peer, method, params) = (to_core(peer), method.to_owned(), std::mem::take(params));
        Some(Box::pin(async move {
            let answer = stack.call_waiting(peer, method, params).await?;
            trimmer.saw(&answer);
            Ok(answer)
        }))
    }
}

/// Accounts as the toolstack asks for them.
pub struct Guards(pub Accounts);

impl tapio_core::Accounts for Guards {
    fn authenticate(&self, user: &str, password: &str, peer: &tapio_core::Peer) -> Result<Role, ApiError> {
        let peer = Peer { superuser: peer.superuser, address: peer.address.clone() };
        self.0.authenticate(user, password, &peer)
    }

    fn change_password(&self, user: &str, old: &str, new: &str) -> Result<(), ApiError> {
        self.0.change_password(user, old, new)
    }
}
