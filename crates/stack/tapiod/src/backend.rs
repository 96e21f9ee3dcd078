//! The toolstack behind its API's servers: what `api` asks for, in `core`'s terms.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tapio_api::accounts::{Accounts, Watch};
use tapio_api::backend::{ApiBackend, BoxFuture, Peer};
use tapio_core::{Credential, Login, Toolstack};
use tapio_model::{Answer, ApiError, Begun, OtherHost, Role, Transfer, TransferPlace, Value};

use crate::memory::Trimmer;

/// The toolstack as a server of its API calls it.
pub struct StackBackend {
    pub stack: Arc<Toolstack>,
    pub trimmer: Trimmer,
}

fn to_core(peer: &Peer) -> tapio_core::Peer {
    let Peer { superuser, address, certificate } = peer.clone();
    tapio_core::Peer { superuser, address, certificate }
}

impl ApiBackend for StackBackend {
    fn call(&self, peer: &Peer, method: &str, params: Vec<Value>) -> Result<Answer, ApiError> {
        let answer = self.stack.answer(&to_core(peer), method, params)?;
        self.trimmer.saw(&answer);
        Ok(answer)
    }

    fn account_of(&self, session: &str) -> Option<String> {
        self.stack.account_of(session)
    }

    fn transfer(
        &self,
        transfer: &Transfer,
        data: OwnedFd,
        begun: &mut dyn FnMut(Begun),
        is_taken: &dyn Fn() -> bool,
    ) -> Result<(), ApiError> {
        self.stack.transfer(transfer, data, begun, is_taken)
    }

    fn has_others(&self) -> bool {
        self.stack.has_others()
    }

    fn elsewhere(
        &self,
        session: &str,
        place: &TransferPlace,
        task: Option<&str>,
    ) -> Result<Option<OtherHost>, ApiError> {
        self.stack.elsewhere(session, place, task)
    }

    fn console(&self, session: &str, name: &str) -> Result<OwnedFd, ApiError> {
        self.stack.console(session, name)
    }

    fn console_of(&self, session: &str, name: &str) -> Result<String, ApiError> {
        self.stack.console_of(session, name)
    }

    fn console_lost(&self, session: &str) -> BoxFuture<()> {
        Box::pin(Arc::clone(&self.stack).console_lost(session.to_owned()))
    }

    fn wait(
        &self,
        peer: &Peer,
        method: &str,
        params: &mut Vec<Value>,
    ) -> Option<BoxFuture<Result<Answer, ApiError>>> {
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
pub struct StackAccounts(pub Arc<Accounts>);

impl tapio_core::Accounts for StackAccounts {
    fn authenticate(&self, user: &str, password: &str, peer: &tapio_core::Peer) -> Result<Login, ApiError> {
        let peer = Peer { superuser: peer.superuser, address: peer.address.clone(), certificate: None };
        let opened = self.0.authenticate(user, password, &peer)?;
        Ok(Login { role: opened.role, credential: Credential(opened.print) })
    }

    fn change_password(&self, user: &str, old: &str, new: &str) -> Result<Credential, ApiError> {
        self.0.change_password(user, old, new).map(Credential)
    }

    fn generation(&self) -> u64 {
        self.0.generation()
    }

    fn standings(&self, asked: &[(&str, Credential)]) -> Result<Vec<Option<Role>>, ApiError> {
        let asked: Vec<(&str, u64)> = asked.iter().map(|(user, credential)| (*user, credential.0)).collect();
        self.0.standings(&asked)
    }
}

/// Holds open sessions against the accounts as soon as their files change, so that calls that wait end or go on with
/// what their account may do now. Calls that begin look for themselves.
pub fn watch_accounts(accounts: &Arc<Accounts>, stack: &Arc<Toolstack>) {
    let mut watch = match Watch::new(accounts.files()) {
        Ok(watch) => watch,
        Err(why) => {
            tracing::warn!("{why}: calls that wait hear of changed accounts some seconds later");
            return;
        }
    };
    let stack = Arc::downgrade(stack);
    let watching = std::thread::Builder::new().name("tapiod-accounts".into()).spawn(move || {
        while let Ok(()) = watch.wait() {
            let Some(stack) = stack.upgrade() else { return };
            if let Err(error) = stack.sessions.review() {
                tracing::error!(%error, "sessions of accounts are refused until the accounts can be read");
            }
        }
    });
    if let Err(error) = watching {
        tracing::warn!("no thread: {error}; calls that wait hear of changed accounts some seconds later");
    }
}
