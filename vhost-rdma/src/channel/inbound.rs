//! The way in: daemons that connect, and what they may say.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::frame::Decoder;
use super::tls::is_for;
use crate::rnic::Directory;

/// Connections at one time, those that have not said yet who they are included.
const CONNECTIONS: usize = 64;
/// How long one may take to say that.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long one may say nothing: longer than the other side keeps a connection that carries nothing.
const IDLE: Duration = Duration::from_secs(120);

/// Takes connections for ever.
pub(super) async fn listen(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    directory: Arc<Directory>,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let acceptor = TlsAcceptor::from(config);
    loop {
        // The semaphore lives as long as this loop and is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            // Out of descriptors, most likely: waits, so that the loop does not burn a core.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of another daemon");
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let (acceptor, directory) = (acceptor.clone(), directory.clone());
        tokio::spawn(async move {
            match serve(stream, from, &acceptor, &directory).await {
                Ok(()) => {}
                Err(error) => tracing::warn!(%from, %error, "another daemon's connection ended"),
            }
            drop(place);
        });
    }
}

async fn serve(
    stream: TcpStream,
    from: SocketAddr,
    acceptor: &TlsAcceptor,
    directory: &Directory,
) -> io::Result<()> {
    let mut stream = timeout(HANDSHAKE, acceptor.accept(stream)).await??;
    let certificate: CertificateDer<'static> = {
        let (_, session) = stream.get_ref();
        let chain = session.peer_certificates().and_then(<[_]>::first);
        chain.cloned().ok_or(io::ErrorKind::PermissionDenied)?
    };
    tracing::debug!(%from, "another daemon is connected");
    let may_be = |host: &str| is_for(&certificate, host);
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
            let Err(why) = directory.accept(&network, mad, may_be) else { continue };
            // Once, or a peer could fill the log.
            if !std::mem::replace(&mut refused, true) {
                tracing::warn!(%from, network, %why, "a datagram of another daemon is refused");
            }
        }
    }
}
