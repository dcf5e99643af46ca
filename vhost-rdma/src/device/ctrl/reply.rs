//! From an engine's reply to a response's bytes.

use virtio_rdma_abi::{ContextCreateResp, ObjectResp, RespHdr, cmd_status};
use zerocopy::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

use super::RESPONSE_MAX;
use crate::shard::{Reply, Status};

/// A response: header and body.
#[derive(Debug)]
pub(crate) struct Response {
    bytes: [u8; RESPONSE_MAX],
    len: usize,
}

impl Response {
    fn header(status: u32) -> Self {
        let mut response = Self { bytes: [0; RESPONSE_MAX], len: 0 };
        response.push(&RespHdr { status: status.into(), reserved: U32::ZERO });
        response
    }

    /// What fits is decided before: no response is longer than the array (a test says so).
    fn push(&mut self, part: &(impl IntoBytes + Immutable)) {
        let part = part.as_bytes();
        if let Some(space) = self.bytes.get_mut(self.len..self.len + part.len()) {
            space.copy_from_slice(part);
            self.len += part.len();
        }
    }

    /// A refusal; it has no body.
    pub(crate) fn error(status: Status) -> Self {
        Self::header(status.0)
    }

    /// Success, with `len` bytes of body: what this device knows, cut to what the driver knows.
    ///
    /// The engine counts kick queues from 0, the guest needs the virtqueue.
    pub(super) fn ok(reply: &Reply, kick_base: u32, len: usize) -> Self {
        let mut response = Self::header(cmd_status::OK);
        match reply {
            Reply::Done => {}
            Reply::Init(body) => response.push(body),
            Reply::Device(body) => response.push(body.as_ref()),
            Reply::Port(body) => response.push(body),
            Reply::Counters(body) => response.push(body.as_ref()),
            Reply::Context(body) => {
                let kick_queue = (body.kick_queue.get() + kick_base).into();
                response.push(&ContextCreateResp { ctx: body.ctx, kick_queue });
            }
            Reply::DbPage(body) => response.push(body),
            Reply::Object(object) => {
                response.push(&ObjectResp { object: (*object).into(), reserved: U32::ZERO });
            }
            Reply::Mr(body) => response.push(body),
            Reply::Srq(body) => response.push(body),
            Reply::SrqAttr(body) => response.push(body),
            Reply::Qp(body) => response.push(body),
            Reply::QpAttr(body) => response.push(body.as_ref()),
        }
        response.len = RESPONSE_MAX.min(size_of::<RespHdr>() + len);
        response
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
