//! Messages on the wire, and the blocking call of the CNI binary.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Fault, FaultKind, Reply, Request, VERSION};

/// The longest message, without its newline. A record has some 2 KiB; a garbage collection of a
/// full node names 250 pods.
pub const MESSAGE_MAX: usize = 4 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nobody listens.
    #[error(
        "the node agent cannot be reached at {path}: {source}; is vhost-rdma-agent running on this \
         node?"
    )]
    Unreachable {
        /// The socket.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else listens there.
    #[error(
        "whoever listens at {path} is user {uid} and not root: that is no node agent, and nothing \
         was asked"
    )]
    Stranger {
        /// The socket.
        path: String,
        /// Who.
        uid: u32,
    },
    /// It broke in the middle.
    #[error("the node agent at {path} did not answer: {source}")]
    Broken {
        /// The socket.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// It answered, but no.
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl CallError {
    /// The CNI error code: a missing agent may be one that is being replaced, so the runtime should
    /// try again.
    #[must_use]
    pub const fn cni_code(&self) -> u32 {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } => FaultKind::TryAgain.cni_code(),
            Self::Stranger { .. } => FaultKind::Internal.cni_code(),
            Self::Fault(fault) => fault.kind.cni_code(),
        }
    }
}

#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u32,
    #[serde(flatten)]
    message: &'a T,
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

/// One message with its newline.
///
/// # Errors
/// It cannot be written as JSON, or is too long.
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(&Versioned { version: VERSION, message })?;
    if bytes.len() > MESSAGE_MAX {
        return Err(too_long());
    }
    bytes.push(b'\n');
    Ok(bytes)
}

/// Understands one message.
///
/// # Errors
/// A [`Fault`] that says what is wrong with it; a version that is not spoken is told apart from a
/// malformed message.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Fault> {
    let bad = |message: String| Fault { kind: FaultKind::BadRequest, message };
    let VersionOnly { version } = serde_json::from_slice(bytes)
        .map_err(|error| bad(format!("not a message between CNI plugin and agent: {error}")))?;
    if version != VERSION {
        return Err(bad(format!(
            "version {version} of the conversation between CNI plugin and agent is not known here, \
             only {VERSION}; install plugin and agent of the same release"
        )));
    }
    serde_json::from_slice(bytes).map_err(|error| bad(format!("malformed message: {error}")))
}

/// Reads one message: to the newline or the end, whichever comes first.
///
/// # Errors
/// The stream broke, or the message is too long.
pub fn read_message(stream: impl Read) -> io::Result<Vec<u8>> {
    let limit = MESSAGE_MAX as u64 + 1;
    let mut bytes = Vec::new();
    BufReader::new(stream.take(limit)).read_until(b'\n', &mut bytes)?;
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    } else if bytes.len() > MESSAGE_MAX {
        return Err(too_long());
    }
    Ok(bytes)
}

fn too_long() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("a message is longer than {MESSAGE_MAX} bytes"),
    )
}

/// Asks the agent behind `socket` and waits at most `patience` for the whole exchange.
///
/// # Errors
/// See [`CallError`]; a refusal is [`CallError::Fault`], never a [`Reply`].
pub fn call(socket: &Path, request: &Request, patience: Duration) -> Result<Reply, CallError> {
    let path = || socket.display().to_string();
    let stream = UnixStream::connect(socket)
        .map_err(|source| CallError::Unreachable { path: path(), source })?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)
        .map_err(|error| CallError::Broken { path: path(), source: error.into() })?;
    // What is answered is done as root, so only root's answer will do; a test's agent runs as the
    // test does.
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        return Err(CallError::Stranger { path: path(), uid: peer.uid.as_raw() });
    }
    let bytes = exchange(&stream, request, patience)
        .map_err(|source| CallError::Broken { path: path(), source })?;
    match decode(&bytes)? {
        Reply::Fault(fault) => Err(fault.into()),
        reply => Ok(reply),
    }
}

fn exchange(mut stream: &UnixStream, request: &Request, patience: Duration) -> io::Result<Vec<u8>> {
    let end = Instant::now() + patience;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(&encode(request)?)?;
    stream.shutdown(Shutdown::Write)?;
    let bytes = read_message(Patient { stream, end })?;
    if bytes.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"));
    }
    Ok(bytes)
}

/// A stream whose reads together end at one moment: a timeout on each read alone would let a
/// trickle go on for ever.
struct Patient<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::Duration;

    use super::{MESSAGE_MAX, call, decode, encode, read_message};
    use crate::{
        Attach, Attachment, Companion, Detach, Fault, FaultKind, Nic, Personality, Pod, Record,
        Reply, Request, State, Step,
    };

    fn attachment() -> Attachment {
        Attachment { container_id: "c1".to_owned(), if_name: "eth0".to_owned() }
    }

    fn attach() -> Request {
        Request::Attach(Attach {
            pod: Pod { namespace: "ns".to_owned(), name: "p".to_owned(), uid: None },
            attachment: attachment(),
            netns: "/run/netns/x".to_owned(),
            network: "net".to_owned(),
            device_id: Some("blue-0".to_owned()),
            mac: None,
            config: None,
        })
    }

    fn record() -> Record {
        let nic = Nic {
            id: "blue-0".to_owned(),
            pool: "blue".to_owned(),
            network: "blue".to_owned(),
            if_name: "rdma0".to_owned(),
            mac: Some("02:00:00:00:00:01".to_owned()),
            addresses: Vec::new(),
            mtu: Some(1500),
            personality: Personality::VhostUser {
                dir: "/run/x".to_owned(),
                socket: "/run/x/vhost.sock".to_owned(),
                container_socket: "/run/y/vhost.sock".to_owned(),
                companion: Companion::default(),
            },
        };
        Record {
            pod: Pod::default(),
            attachment: attachment(),
            network: "net".to_owned(),
            netns: "/run/netns/x".to_owned(),
            state: State::Attaching,
            nic,
            steps: vec![Step::MakeLink { name: "rdma0".to_owned(), netns: None }],
            done: None,
            config: None,
        }
    }

    #[test]
    fn requests_are_flat_objects_with_a_version() {
        let text = String::from_utf8(encode(&attach()).unwrap()).unwrap();
        assert_eq!(
            text,
            "{\"version\":1,\"op\":\"attach\",\"pod\":{\"namespace\":\"ns\",\"name\":\"p\"},\
             \"container_id\":\"c1\",\"if_name\":\"eth0\",\"netns\":\"/run/netns/x\",\
             \"network\":\"net\",\"device_id\":\"blue-0\"}\n"
        );
    }

    #[test]
    fn what_is_said_is_understood() {
        let requests = [
            Request::Status,
            attach(),
            Request::Check(attachment()),
            Request::Detach(Detach {
                container_id: "c".to_owned(),
                if_name: None,
                device_id: None,
            }),
        ];
        for request in requests {
            assert_eq!(decode::<Request>(&encode(&request).unwrap()).unwrap(), request);
        }
        let replies =
            [Reply::Done, Reply::Records(vec![record()]), Reply::Nics(vec![record().nic])];
        for reply in replies {
            assert_eq!(decode::<Reply>(&encode(&reply).unwrap()).unwrap(), reply);
        }
    }

    #[test]
    fn a_newer_side_may_add_fields_but_not_another_version() {
        assert!(decode::<Request>(br#"{"version":1,"op":"status","new":true}"#).is_ok());
        let fault = decode::<Request>(br#"{"version":2,"op":"status"}"#).unwrap_err();
        assert!(fault.message.contains("version 2"), "{fault}");
        for text in ["", "{", "[]", r#"{"op":"status"}"#, r#"{"version":1,"op":"steal"}"#] {
            assert!(decode::<Request>(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_message_ends_with_its_line_or_its_stream_and_is_bounded() {
        assert_eq!(read_message(&b"{}\nrest"[..]).unwrap(), b"{}");
        assert_eq!(read_message(&b"{}"[..]).unwrap(), b"{}");
        assert_eq!(read_message(&vec![b'x'; MESSAGE_MAX][..]).unwrap().len(), MESSAGE_MAX);
        assert!(read_message(&vec![b'x'; MESSAGE_MAX + 1][..]).is_err());
        assert!(read_message(std::io::repeat(b'x')).is_err());
    }

    #[test]
    fn refusals_silence_and_absence_are_three_errors() {
        let dir = tempdir();
        let path = dir.join("s");
        let patience = Duration::from_millis(200);
        let gone = call(&path, &Request::Status, patience).unwrap_err();
        assert_eq!(gone.cni_code(), 11);
        let listener = UnixListener::bind(&path).unwrap();
        let silent = call(&path, &Request::Status, patience).unwrap_err();
        assert!(silent.to_string().contains("did not answer"), "{silent}");
        let server = std::thread::spawn(move || {
            let (_first, _) = listener.accept().unwrap();
            let (mut second, _): (UnixStream, _) = listener.accept().unwrap();
            let asked: Request = decode(&read_message(&second).unwrap()).unwrap();
            assert_eq!(asked, Request::Status);
            let fault = Fault { kind: FaultKind::NotFound, message: "no".to_owned() };
            second.write_all(&encode(&Reply::Fault(fault)).unwrap()).unwrap();
        });
        let refused = call(&path, &Request::Status, Duration::from_secs(10)).unwrap_err();
        assert_eq!((refused.cni_code(), refused.to_string().as_str()), (3, "no"));
        server.join().unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }

    fn tempdir() -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("agent-api-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }
}
