//! How long requests and responses are, and which of their bytes must be zero: what lets drivers
//! and devices of different ages understand each other (docs/virtio-rdma.md §5.9).
//!
//! A later revision of the device appends fields and gives meaning to reserved bytes; it never
//! moves anything. So each body has two lengths: its *base*, which every driver and device knows,
//! and the one that this device knows. A request may have any length from its base on: what is
//! missing is zero, and what this device does not know must be zero, since otherwise the driver
//! asks for something that it would not get. A response is cut to the driver's room and filled with
//! zeroes up to what this device knows.
//!
//! This file knows layouts and no meaning; which bytes are reserved comes from the definition of
//! the ABI itself.

use virtio_rdma_abi as abi;
use virtio_rdma_abi::{StructLayout, cmd};

use crate::shard::Status;

/// The lengths of one opcode's bodies, in bytes and without headers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    /// The request as this device knows it; `None`: it has no body.
    pub(super) layout: Option<&'static StructLayout>,
    /// The shortest request there is.
    pub(super) request_base: usize,
    /// The response as this device knows it.
    pub(super) response: usize,
    /// The shortest response that a driver leaves room for.
    pub(super) response_base: usize,
}

impl Lengths {
    /// Of bodies that have not grown since version 1.
    const fn new(layout: Option<&'static StructLayout>, response: usize) -> Self {
        let request_base = match layout {
            Some(layout) => layout.size,
            None => 0,
        };
        Self { layout, request_base, response, response_base: response }
    }

    /// The request as this device knows it.
    pub(super) fn request(&self) -> usize {
        self.layout.map_or(0, |layout| layout.size)
    }

    /// Whether a request and the room for its response are long enough, and the request asks for
    /// nothing unknown.
    ///
    /// `whole`: `body` is all of it, and not the first part of one that no device knows.
    pub(super) fn check(&self, body: &[u8], whole: bool, room: usize) -> Result<(), Status> {
        if body.len() < self.request_base || room < self.response_base {
            return Err(Status::INVAL);
        }
        let known = self.layout.is_none_or(|layout| reserved_is_zero(layout, body));
        let surplus = body.get(self.request()..).unwrap_or_default();
        if whole && known && is_zero(surplus) { Ok(()) } else { Err(Status::NOTSUPP) }
    }
}

/// The lengths of an opcode's bodies. `None` for an opcode that there is not.
pub(super) const fn of(opcode: u16) -> Option<Lengths> {
    const OBJECT: Option<&StructLayout> = Some(&abi::ObjectReq::LAYOUT);
    const CREATED: usize = size_of::<abi::ObjectResp>();
    const fn known(layout: &'static StructLayout, response: usize) -> Lengths {
        Lengths::new(Some(layout), response)
    }
    Some(match opcode {
        // Its first form had no capabilities.
        cmd::INIT => Lengths {
            request_base: core::mem::offset_of!(abi::InitReq, caps),
            response_base: core::mem::offset_of!(abi::InitResp, caps),
            ..known(&abi::InitReq::LAYOUT, size_of::<abi::InitResp>())
        },
        cmd::SHUTDOWN | cmd::CONTEXT_DESTROY => Lengths::new(None, 0),
        cmd::KEEPALIVE => known(&abi::KeepaliveReq::LAYOUT, 0),
        cmd::QUERY_DEVICE => Lengths::new(None, size_of::<abi::QueryDeviceResp>()),
        cmd::QUERY_PORT => Lengths::new(None, size_of::<abi::QueryPortResp>()),
        cmd::GID_SET => known(&abi::GidSetReq::LAYOUT, 0),
        cmd::QUERY_COUNTERS => Lengths::new(None, size_of::<abi::QueryCountersResp>()),
        cmd::CONTEXT_CREATE => {
            known(&abi::ContextCreateReq::LAYOUT, size_of::<abi::ContextCreateResp>())
        }
        cmd::DB_PAGE_ADD => known(&abi::DbPageAddReq::LAYOUT, size_of::<abi::DbPageAddResp>()),
        cmd::PD_CREATE => Lengths::new(None, CREATED),
        cmd::PD_DESTROY
        | cmd::MR_DEREG
        | cmd::MW_DEALLOC
        | cmd::CQ_DESTROY
        | cmd::SRQ_DESTROY
        | cmd::QP_DESTROY
        | cmd::AH_DESTROY => Lengths::new(OBJECT, 0),
        cmd::MR_REG => known(&abi::MrRegReq::LAYOUT, size_of::<abi::MrResp>()),
        cmd::MR_DMA => known(&abi::MrDmaReq::LAYOUT, size_of::<abi::MrResp>()),
        cmd::MR_ALLOC => known(&abi::MrAllocReq::LAYOUT, CREATED),
        cmd::MR_REREG => known(&abi::MrReregReq::LAYOUT, size_of::<abi::MrResp>()),
        cmd::MW_ALLOC => known(&abi::MwAllocReq::LAYOUT, CREATED),
        cmd::CQ_CREATE => known(&abi::CqCreateReq::LAYOUT, CREATED),
        cmd::CQ_RESIZE => known(&abi::CqResizeReq::LAYOUT, 0),
        cmd::CQ_MODERATE => known(&abi::CqModerateReq::LAYOUT, 0),
        cmd::SRQ_CREATE => known(&abi::SrqCreateReq::LAYOUT, size_of::<abi::SrqCreateResp>()),
        cmd::SRQ_MODIFY => known(&abi::SrqModifyReq::LAYOUT, 0),
        cmd::SRQ_QUERY => Lengths::new(OBJECT, size_of::<abi::SrqQueryResp>()),
        cmd::QP_CREATE => known(&abi::QpCreateReq::LAYOUT, size_of::<abi::QpCreateResp>()),
        cmd::QP_MODIFY => known(&abi::QpModifyReq::LAYOUT, 0),
        cmd::QP_QUERY => Lengths::new(OBJECT, size_of::<abi::QpQueryResp>()),
        cmd::AH_CREATE => known(&abi::AhCreateReq::LAYOUT, CREATED),
        cmd::MCAST_ATTACH | cmd::MCAST_DETACH => known(&abi::McastReq::LAYOUT, 0),
        _ => return None,
    })
}

/// How a request names memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Names {
    /// The address of a page.
    Page,
    /// A page list.
    List,
}

/// The fields of an opcode's request by which memory is named, and where in its body they are.
pub(crate) fn names(opcode: u16) -> impl Iterator<Item = (usize, Names)> {
    let layout = of(opcode).and_then(|lengths| lengths.layout);
    layout.into_iter().flat_map(|layout| layout.fields).filter_map(|field| {
        match (field.name, field.ty) {
            (_, "PageList") => Some((field.offset, Names::List)),
            ("db_page" | "status_page", _) => Some((field.offset, Names::Page)),
            _ => None,
        }
    })
}

/// The layout of a field's type, if that is a struct of the ABI.
fn nested(ty: &str) -> Option<&'static StructLayout> {
    match ty {
        "PageList" => Some(&abi::PageList::LAYOUT),
        "Av" => Some(&abi::Av::LAYOUT),
        "QpAttr" => Some(&abi::QpAttr::LAYOUT),
        _ => None,
    }
}

/// Whether every reserved byte of a struct is zero, in so much of it as there is.
pub(super) fn reserved_is_zero(layout: &StructLayout, bytes: &[u8]) -> bool {
    layout.fields.iter().all(|field| {
        let end = bytes.len().min(field.offset + field.size);
        let Some(bytes) = bytes.get(field.offset..end) else { return true };
        if field.name.starts_with("reserved") {
            return is_zero(bytes);
        }
        nested(field.ty).is_none_or(|inner| reserved_is_zero(inner, bytes))
    })
}

/// Makes a request that is noise one that asks for nothing unknown, so that it gets further.
#[cfg(any(test, feature = "fuzzing"))]
pub(in crate::device) fn clear_reserved(opcode: u16, body: &mut [u8]) {
    let Some(known) = of(opcode) else { return };
    if let Some(surplus) = body.get_mut(known.request()..) {
        surplus.fill(0);
    }
    for at in 0..body.len() {
        let mut one = vec![0; body.len()];
        one[at] = 1;
        if known.layout.is_some_and(|layout| !reserved_is_zero(layout, &one)) {
            body[at] = 0;
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALARS: [&str; 4] = ["u8", "U16", "U32", "U64"];

    /// A struct that nobody looks into could carry a byte that nobody checks.
    #[test]
    fn every_nested_struct_of_a_request_is_looked_into() {
        for &(name, opcode) in cmd::TABLE {
            let opcode = u16::try_from(opcode).expect("16 bits");
            let Some(layout) = of(opcode).expect("known").layout else { continue };
            let mut layouts = vec![layout];
            while let Some(layout) = layouts.pop() {
                for field in layout.fields {
                    let scalar = SCALARS.contains(&field.ty) || field.ty.starts_with('[');
                    let inner = nested(field.ty);
                    assert!(scalar != inner.is_some(), "{name}: {} {}", field.name, field.ty);
                    layouts.extend(inner);
                }
            }
        }
    }

    #[test]
    fn one_reserved_byte_anywhere_is_found() {
        let list = &abi::PageList::LAYOUT;
        let request = &abi::MrRegReq::LAYOUT;
        let at = request.fields.iter().find(|field| field.ty == "PageList").expect("pages").offset;
        for (offset, byte) in (0..request.size).map(|offset| (offset, 1u8)) {
            let mut bytes = vec![0; request.size];
            bytes[offset] = byte;
            let reserved_in = |layout: &StructLayout, offset: usize| {
                layout.fields.iter().any(|field| {
                    field.name.starts_with("reserved")
                        && (field.offset..field.offset + field.size).contains(&offset)
                })
            };
            let reserved =
                reserved_in(request, offset) || (offset >= at && reserved_in(list, offset - at));
            assert_eq!(reserved_is_zero(request, &bytes), !reserved, "byte {offset}");
        }
    }
}
