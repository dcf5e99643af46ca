//! How the ABI is written down, and the list of everything in it.
//!
//! Each constant and struct is declared once, through one of the two macros here. They define the
//! Rust item *and* register it under the name that it has in `include/virtio_rdma_abi.h`, so that
//! the agreement test can walk the whole ABI: an item which is defined but not compared can not be
//! written.

/// A field of an ABI struct, as the C header names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldLayout {
    /// Name in the C header (a Rust keyword carries its `r#` prefix).
    pub name: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// The Rust type as it is written.
    pub ty: &'static str,
}

/// An ABI struct, as the C header names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// Name in the C header without the prefix `virtio_rdma_`.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// The fields in order.
    pub fields: &'static [FieldLayout],
}

/// The name of a constant in the C header.
macro_rules! c_name {
    ($prefix:literal, $name:ident) => {
        concat!($prefix, stringify!($name))
    };
    ($prefix:literal, $name:ident, $full:literal) => {
        $full
    };
}

/// Defines a module of constants and its `TABLE` of C names and values.
macro_rules! abi_consts {
    (
        $(#[$doc:meta])*
        pub mod $module:ident = $prefix:literal {
            $( $(#[$cdoc:meta])* $name:ident : $ty:ty = $value:expr $(=> $full:literal)? ; )*
        }
    ) => {
        $(#[$doc])*
        pub mod $module {
            $( $(#[$cdoc])* pub const $name: $ty = $value; )*

            /// Every constant of this module: its name in the C header and its value.
            pub const TABLE: &[(&str, u64)] =
                &[$( ($crate::table::c_name!($prefix, $name $(, $full)?), $name as u64), )*];
        }
    };
}

/// Defines a struct of the ABI with its size and registers its layout as `LAYOUT`.
macro_rules! abi_struct {
    (
        $(#[$doc:meta])*
        pub struct $name:ident = $c_name:literal, $size:literal {
            $( $(#[$fdoc:meta])* pub $field:ident : $ty:ty, )*
        }
    ) => {
        $(#[$doc])*
        #[derive(
            Clone,
            Copy,
            Debug,
            PartialEq,
            Eq,
            zerocopy::FromBytes,
            zerocopy::IntoBytes,
            zerocopy::KnownLayout,
            zerocopy::Immutable,
            zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $( $(#[$fdoc])* pub $field: $ty, )*
        }

        const _: () = assert!(size_of::<$name>() == $size);

        impl $name {
            /// Name, size and fields in the C header.
            pub const LAYOUT: $crate::table::StructLayout = $crate::table::StructLayout {
                name: $c_name,
                size: size_of::<Self>(),
                fields: &[$(
                    $crate::table::FieldLayout {
                        name: stringify!($field),
                        offset: core::mem::offset_of!(Self, $field),
                        size: size_of::<$ty>(),
                        ty: stringify!($ty),
                    },
                )*],
            };
        }

        impl Default for $name {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        }
    };
}

pub(crate) use {abi_consts, abi_struct, c_name};
