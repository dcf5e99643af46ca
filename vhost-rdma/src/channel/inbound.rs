//! The way in: daemons that connect, and what they may say.
//!
//! A connection that has not shown a certificate of the authority yet is a stranger's. Strangers
//! have 32 places of their own and five seconds, daemons have as many as the operator chose, and
//! whoever comes always finds one (`places`): when there are too many, the oldest connection of
//! whoever has the most is closed. Strangers are told apart by their address, of IPv6 by the 64
//! bits of its network; daemons by their certificate. That is:
//!
//! - Nothing that strangers do ends the connection of a daemon, or takes its place.
//! - Strangers at fewer than 32 addresses keep no daemon at one of its own from its handshake,
//!   however many connections they open.
//! - A daemon that opens many connections loses its own: it has four at most, where one is enough.
//!   Where more daemons are connected than there are places the oldest connection goes, and comes
//!   back when it has something to say. Those that say nothing for two minutes go anyway.
//!
//! Not guaranteed is the handshake of a daemon at an address that strangers have as well (behind
//! one NAT, say), or while strangers come from more addresses: then 32 newer connections in the
//! time of its handshake close it, and it tries again. And every connection and handshake costs
//! time of the channel's thread, on which no guest is served.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Known;
use super::frame::Decoder;
use super::tls::is_for;
use crate::places::{Place, Places, origin};
use crate::rnic::Directory;

/// Connections that have not said yet who they are.
pub(super) const STRANGERS: usize = 32;
/// How long one may take to say that.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections of one daemon: one, and what is left of those before.
pub(super) const OF_ONE: usize = 4;
/// How long one may say nothing: longer than the other side keeps a connection that carries
/// nothing.
const IDLE: Duration = Duration::from_secs(120);

type Certificate = CertificateDer<'static>;

/// Who may come in, and how many.
struct Door {
    identity: watch::Receiver<Known>,
    directory: Arc<Directory>,
    /// Holders are told apart by their certificates.
    daemons: Arc<Places<Arc<[u8]>>>,
}

/// Takes connections for ever.
pub(super) async fn listen(
    listener: TcpListener,
    identity: watch::Receiver<Known>,
    directory: Arc<Directory>,
    daemons: usize,
) {
    let strangers = Places::new(STRANGERS, STRANGERS);
    let door = Arc::new(Door { identity, directory, daemons: Places::new(daemons, OF_ONE) });
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Out of descriptors, most likely: waits, so that the loop does not burn a core.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of another daemon");
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let place = strangers.take(&origin(from));
        let door = door.clone();
        tokio::spawn(async move {
            if let Err(error) = door.serve(stream, from, place).await {
                tracing::warn!(%from, %error, "another daemon's connection ended");
            }
        });
        // The connection whose place was taken closes before the next is accepted, so there are
        // never more than there are places.
        tokio::task::yield_now().await;
    }
}

impl Door {
    async fn serve(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        mut stranger: Place<IpAddr>,
    ) -> io::Result<()> {
        let mut identity = self.identity.clone();
        let server = identity.borrow_and_update().as_ref().map(|known| known.server.clone());
        let Some(server) = server else { return Ok(()) };
        let acceptor = TlsAcceptor::from(server);
        let stream = tokio::select! {
            made = timeout(HANDSHAKE, acceptor.accept(stream)) => made??,
            () = stranger.lost() => {
                tracing::debug!(%from, "too many connections: one without a certificate is closed");
                return Ok(());
            }
        };
        let certificate: Certificate = {
            let (_, session) = stream.get_ref();
            let chain = session.peer_certificates().and_then(<[_]>::first);
            chain.cloned().ok_or(io::ErrorKind::PermissionDenied)?
        };
        let mut place = self.daemons.take(&certificate.as_ref().into());
        drop(stranger);
        tracing::debug!(%from, "another daemon is connected");
        tokio::select! {
            ended = self.listen_to(stream, from, &certificate) => ended,
            () = place.lost() => Err(io::Error::other("too many connections of daemons")),
            // It comes back, if it is still let in.
            _ = identity.changed() => Ok(()),
        }
    }

    async fn listen_to(
        &self,
        mut stream: TlsStream<TcpStream>,
        from: SocketAddr,
        certificate: &Certificate,
    ) -> io::Result<()> {
        let may_be = |host: &str| is_for(certificate, host);
        let mut decoder = Decoder::default();
        let mut bytes = [0; 4096];
        let mut refused = false;
        loop {
            let read = match timeout(IDLE, stream.read(&mut bytes)).await {
                Ok(read) => read?,
                Err(_) => return Ok(()),
            };
            let Some(arrived) = bytes.get(..read).filter(|arrived| !arrived.is_empty()) else {
                return Ok(());
            };
            decoder.push(arrived);
            while let Some(frame) = decoder.next().map_err(io::Error::other)? {
                let (network, mad) = (frame.network, frame.mad);
                let Err(why) = self.directory.accept(&network, mad, may_be) else { continue };
                // Once, or a peer could fill the log.
                if !std::mem::replace(&mut refused, true) {
                    tracing::warn!(%from, network, %why, "a datagram of another daemon is refused");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_stranger_and_of_ipv6_a_network_is() {
        let same =
            |one: &str, other: &str| origin(one.parse().unwrap()) == origin(other.parse().unwrap());
        assert!(same("192.0.2.1:1", "192.0.2.1:2") && !same("192.0.2.1:1", "192.0.2.2:1"));
        assert!(same("192.0.2.1:1", "[::ffff:192.0.2.1]:2"));
        assert!(!same("[::ffff:192.0.2.1]:1", "[::ffff:192.0.2.2]:1"));
        assert!(same("[2001:db8::1]:1", "[2001:db8::f:2]:1"));
        assert!(!same("[2001:db8::1]:1", "[2001:db8:0:1::1]:1"));
    }
}
