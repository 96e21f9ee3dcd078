//! The toolstack behind its doors: what `api` asks for, in `core`'s terms.

use std::sync::Arc;

use tapio_api::accounts::Accounts;
use tapio_api::door::{BoxFuture, Door, Peer};
use tapio_core::Toolstack;
use tapio_model::{ApiError, Role, Value};

/// The toolstack as a door leads to it.
pub struct Desk(pub Arc<Toolstack>);

fn to_core(peer: &Peer) -> tapio_core::Peer {
    tapio_core::Peer { superuser: peer.superuser, address: peer.address.clone() }
}

impl Door for Desk {
    fn call(&self, peer: &Peer, method: &str, params: Vec<Value>) -> Result<Value, ApiError> {
        self.0.call(&to_core(peer), method, params)
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
        let stack = Arc::clone(&self.0);
        Some(Box::pin(stack.call_waiting(to_core(peer), method.to_owned(), std::mem::take(params))))
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
