//! Old kubelets (before 1.26, kubernetes#112597) put the plugin's socket path into the HTTP/2
//! `:authority`, where RFC 3986 allows no `/`, and the HTTP/2 library here refuses such requests
//! (hyperium/h2#487). This stream sits below it and, in what the kubelet sends, puts a `-` for each
//! `/` of that one known path.
//!
//! The replacement has the same length: plain trivially, and Huffman-coded because RFC 7541 gives
//! both characters codes of six bits. So no frame length changes, and the header compression of
//! both sides stays in step: the decoder keeps the replaced text in its table wherever the encoder
//! keeps the path. Only the first HEADERS frame of a connection is looked into, since later ones
//! refer to the table.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// The client connection preface (RFC 9113 §3.4).
const PREFACE: usize = 24;
/// A frame header (RFC 9113 §4.1).
const HEADER: usize = 9;
/// The frame type HEADERS (RFC 9113 §6.2).
const HEADERS: u8 = 1;
/// The largest frame before anybody allowed more (RFC 9113 §4.2).
const FRAME_MAX: usize = 16_384;

/// Characters by the length of their Huffman code (RFC 7541 Appendix B); the code is canonical, so
/// this is all of it for paths.
const CODES: [(u32, &[u8]); 4] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
];

/// The Huffman code of a text; `None` if it has characters that paths do not have.
fn huffman(text: &[u8]) -> Option<Vec<u8>> {
    let code = |byte: u8| {
        let mut first = 0_u32;
        for (length, symbols) in CODES {
            if let Some(at) = symbols.iter().position(|symbol| *symbol == byte) {
                return Some((first + u32::try_from(at).ok()?, length));
            }
            first = (first + u32::try_from(symbols.len()).ok()?) << 1;
        }
        None
    };
    let mut out = Vec::new();
    let (mut bits, mut count) = (0_u64, 0_u32);
    for byte in text {
        let (value, length) = code(*byte)?;
        bits = (bits << length) | u64::from(value);
        count += length;
        while count >= 8 {
            count -= 8;
            out.push(u8::try_from((bits >> count) & 0xff).ok()?);
        }
    }
    if count > 0 {
        // The rest is filled with the most significant bits of EOS, which are ones (RFC 7541 §5.2).
        let padded = (bits << (8 - count)) | ((1 << (8 - count)) - 1);
        out.push(u8::try_from(padded & 0xff).ok()?);
    }
    Some(out)
}

/// What to look for and what to put there, in both codings.
#[derive(Debug, Clone)]
pub(super) struct Patch(Vec<(Vec<u8>, Vec<u8>)>);

impl Patch {
    /// For a socket path.
    pub(super) fn new(path: &str) -> Self {
        let harmless = path.replace('/', "-");
        let mut pairs = vec![(path.as_bytes().to_vec(), harmless.as_bytes().to_vec())];
        if let (Some(from), Some(to)) = (huffman(path.as_bytes()), huffman(harmless.as_bytes()))
            && from.len() == to.len()
        {
            pairs.push((from, to));
        }
        Self(pairs)
    }

    fn apply(&self, block: &mut [u8]) {
        for (from, to) in &self.0 {
            let Some(at) = block.windows(from.len()).position(|window| window == from) else {
                continue;
            };
            if let Some(place) = block.get_mut(at..at + to.len()) {
                place.copy_from_slice(to);
                return;
            }
        }
    }
}

/// How far the connection is read.
#[derive(Debug)]
enum Stage {
    /// Bytes of the preface that are still to come.
    Preface(usize),
    /// A frame header, or a HEADERS frame, as far as it is here.
    Gather,
    /// Bytes of another frame that are still to come.
    Pass(usize),
    /// Nothing more to do.
    Through,
}

/// The scanner: bytes in, bytes out, in the same order.
#[derive(Debug)]
struct Scanner {
    patch: Patch,
    stage: Stage,
    gathered: Vec<u8>,
}

impl Scanner {
    const fn new(patch: Patch) -> Self {
        Self { patch, stage: Stage::Preface(PREFACE), gathered: Vec::new() }
    }

    fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while !input.is_empty() {
            match &mut self.stage {
                Stage::Preface(left) | Stage::Pass(left) => {
                    let (now, rest) = input.split_at(input.len().min(*left));
                    out.extend_from_slice(now);
                    *left -= now.len();
                    input = rest;
                    if *left == 0 {
                        self.stage = Stage::Gather;
                    }
                }
                Stage::Gather => input = self.gather(input, out),
                Stage::Through => {
                    out.extend_from_slice(input);
                    return;
                }
            }
        }
    }

    fn gather<'a>(&mut self, input: &'a [u8], out: &mut Vec<u8>) -> &'a [u8] {
        let wanted = match self.gathered.first_chunk::<HEADER>() {
            None => HEADER,
            Some(header) => HEADER + length(header),
        };
        let take = input.len().min(wanted - self.gathered.len());
        let (now, rest) = input.split_at(take);
        self.gathered.extend_from_slice(now);
        if self.gathered.len() < wanted {
            return rest;
        }
        let Some(header) = self.gathered.first_chunk::<HEADER>() else { return rest };
        let (kind, length) = (header[3], length(header));
        if kind == HEADERS && length <= FRAME_MAX {
            if self.gathered.len() < HEADER + length {
                return rest;
            }
            if let Some(block) = self.gathered.get_mut(HEADER..) {
                self.patch.apply(block);
            }
            self.stage = Stage::Through;
        } else if kind == HEADERS {
            self.stage = Stage::Through;
        } else {
            self.stage = if length == 0 { Stage::Gather } else { Stage::Pass(length) };
        }
        out.append(&mut self.gathered);
        rest
    }
}

fn length(header: &[u8; HEADER]) -> usize {
    (usize::from(header[0]) << 16) | (usize::from(header[1]) << 8) | usize::from(header[2])
}

/// A connection of a kubelet.
#[derive(Debug)]
pub(super) struct KubeletStream {
    stream: UnixStream,
    scanner: Scanner,
    ready: Vec<u8>,
    given: usize,
}

impl KubeletStream {
    /// Wraps an accepted connection.
    pub(super) const fn new(stream: UnixStream, patch: Patch) -> Self {
        Self { stream, scanner: Scanner::new(patch), ready: Vec::new(), given: 0 }
    }
}

impl Connected for KubeletStream {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for KubeletStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let rest = this.ready.get(this.given..).unwrap_or_default();
            if !rest.is_empty() {
                let now = rest.len().min(buffer.remaining());
                buffer.put_slice(rest.get(..now).unwrap_or_default());
                this.given += now;
                return Poll::Ready(Ok(()));
            }
            this.ready.clear();
            this.given = 0;
            if matches!(this.scanner.stage, Stage::Through) {
                return Pin::new(&mut this.stream).poll_read(cx, buffer);
            }
            let mut bytes = [0; 4096];
            let mut chunk = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.scanner.feed(chunk.filled(), &mut this.ready);
        }
    }
}

impl AsyncWrite for KubeletStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert_eq, proptest};

    use super::{HEADERS, PREFACE, Patch, Scanner, huffman};

    const SOCKET: &str = "/var/lib/kubelet/device-plugins/vhost-rdma-blue.sock";

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, 4, 0, 0, 0, 1], payload].concat()
    }

    fn run(input: &[u8], cuts: &[usize]) -> Vec<u8> {
        let mut scanner = Scanner::new(Patch::new(SOCKET));
        let (mut out, mut at) = (Vec::new(), 0);
        for cut in cuts {
            let end = (at + cut).min(input.len());
            scanner.feed(&input[at..end], &mut out);
            at = end;
        }
        scanner.feed(&input[at..], &mut out);
        out
    }

    fn conversation(value: &[u8], huffman: bool) -> Vec<u8> {
        let flag = if huffman { 0x80 } else { 0 };
        let literal =
            [&[0x83, 0x86, 0x41, flag | u8::try_from(value.len()).unwrap()], value].concat();
        let settings = frame(4, &[0, 3, 0, 0, 0, 100]);
        [
            vec![b'P'; PREFACE],
            settings,
            frame(4, &[]),
            frame(HEADERS, &literal),
            frame(0, SOCKET.as_bytes()),
        ]
        .concat()
    }

    /// RFC 7541 §C.4.1 and §C.6.1.
    #[test]
    fn the_code_is_that_of_the_rfc() {
        let hex = |text: &str| {
            (0..text.len())
                .step_by(2)
                .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(huffman(b"www.example.com").unwrap(), hex("f1e3c2e5f23a6ba0ab90f4ff"));
        assert_eq!(huffman(b"no-cache").unwrap(), hex("a8eb10649cbf"));
        assert_eq!(
            huffman(b"https://www.example.com").unwrap(),
            hex("9d29ad171863c78f0b97c8e9ae82ae43d3")
        );
        assert_eq!(huffman(b"~"), None);
    }

    #[test]
    fn the_first_headers_lose_their_slashes_and_nothing_else_changes() {
        let harmless = SOCKET.replace('/', "-");
        for coded in [false, true] {
            let code = |text: &str| {
                if coded { huffman(text.as_bytes()).unwrap() } else { text.as_bytes().to_vec() }
            };
            let (from, to) =
                (conversation(&code(SOCKET), coded), conversation(&code(&harmless), coded));
            // The data frame at the end still names the socket.
            let expected = [&to[..to.len() - SOCKET.len()], SOCKET.as_bytes()].concat();
            assert_eq!(run(&from, &[]), expected);
        }
        let other = conversation(b"localhost", false);
        assert_eq!(run(&other, &[]), other);
    }

    proptest! {
        #[test]
        fn however_it_is_cut_the_bytes_are_the_same(
            cuts in proptest::collection::vec(0_usize..40, 0..30)
        ) {
            let input = conversation(&huffman(SOCKET.as_bytes()).unwrap(), true);
            prop_assert_eq!(run(&input, &cuts), run(&input, &[]));
        }

        #[test]
        fn what_is_no_http2_passes_in_its_length(
            junk in proptest::collection::vec(0_u8.., 0..300)
        ) {
            let mut scanner = Scanner::new(Patch::new(SOCKET));
            let mut out = Vec::new();
            scanner.feed(&junk, &mut out);
            prop_assert_eq!(out.len() + scanner.gathered.len(), junk.len());
        }
    }
}
