//! The request to stop, and why.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::task::Aborting;
use crate::message::StopReason;

/// Ends a running task from outside. Clones are the same request; the first reason stands.
#[derive(Clone, Default)]
pub struct Stop {
    token: CancellationToken,
    reason: Arc<OnceLock<StopReason>>,
}

impl Stop {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn request(&self, reason: StopReason) {
        let _ = self.reason.set(reason);
        self.token.cancel();
    }

    pub fn reason(&self) -> Option<StopReason> {
        self.reason.get().copied()
    }

    /// What a completion and a tool get to see of it.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Comes back `grace` after the request, for whoever was told to stop and needs a moment to do so well.
    pub async fn requested(&self, grace: Duration) -> StopReason {
        self.token.cancelled().await;
        tokio::time::sleep(grace).await;
        self.reason().unwrap_or(StopReason::Interrupted)
    }

    /// Requests a stop after `timeout`, as long as the returned value lives.
    pub(super) fn after(&self, timeout: Duration) -> Aborting<()> {
        let stop = self.clone();
        Aborting::spawn(async move {
            tokio::time::sleep(timeout).await;
            stop.request(StopReason::Timeout);
        })
    }
}
