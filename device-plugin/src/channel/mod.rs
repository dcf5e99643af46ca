//! What this node's daemon needs to speak with those of other nodes: a certificate, and whom there
//! is to speak with.
//!
//! ```text
//!   API server ── certify   a key made here, its certificate, the roots ──> Reload
//!   controller ── stream    where the addresses of other nodes are, by mTLS ──> ReplacePeers
//! ```
//!
//! What comes is kept in [`crate::member`], on the disk first. Nothing here is needed for what
//! runs: without API server and controller the daemon has the certificate and the peers of before,
//! also after a reboot, when the agent gives it what is on the disk. What the two say is looked at
//! before it takes the place of what works.
//!
//! Who decides about NICs is `agent`, which knows the networks that the node hosts, and nothing of
//! this.

pub mod certify;
pub mod stream;

use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::member::Channel;
use crate::member::store::Kept;

/// Between two tries to have the daemon take something.
const RETRY: std::time::Duration = std::time::Duration::from_secs(2);

/// Keeps the daemon in step with what is kept here, for ever. It needs no API server.
pub async fn run<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, channel: &Channel) {
    tokio::join!(publish(agent, channel), stream::run(agent, channel));
}

/// Gives the daemon what is new in the certificates.
async fn publish<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, channel: &Channel) {
    let mut kept = channel.kept.subscribe();
    // The agent before this one may have died between the two.
    let mut owed = kept.borrow().pair.is_some();
    let mut told = String::new();
    loop {
        let now = kept.borrow_and_update().clone();
        if let Err(why) = hand_over(agent, channel, &now, &mut owed).await {
            // Once: it may be away for long.
            if why != told {
                tracing::warn!(why, "the daemon has not the newest certificate; trying again");
                told = why;
            }
            tokio::time::sleep(RETRY).await;
            continue;
        }
        told.clear();
        agent.channel_changed().await;
        if kept.changed().await.is_err() {
            return;
        }
    }
}

/// Writes it where the daemon looks, and has it look; `owed` as long as it has not.
async fn hand_over<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    channel: &Channel,
    kept: &Kept,
    owed: &mut bool,
) -> Result<(), String> {
    *owed |= channel.store.publish(kept).map_err(|error| format!("cannot write it: {error}"))?;
    if *owed {
        agent.reload_daemon().await.map_err(|error| error.to_string())?;
        *owed = false;
        tracing::info!("the daemon has the channel's certificate");
    }
    Ok(())
}
