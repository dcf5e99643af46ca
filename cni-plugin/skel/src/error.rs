//! Errors as CNI defines them: a code, a message, details.

use serde::Serialize;
use serde_json::Value;

/// A CNI error code. The specification reserves 1 to 99; a plugin's own begin at 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Code(pub u32);

impl Code {
    /// The `cniVersion` is none that the plugin speaks, or does not have the command.
    pub const INCOMPATIBLE_VERSION: Self = Self(1);
    /// A field of the configuration is not supported; the message names key and value.
    pub const UNSUPPORTED_FIELD: Self = Self(2);
    /// The container is unknown or gone; the runtime need not clean up.
    pub const UNKNOWN_CONTAINER: Self = Self(3);
    /// Environment variables are missing or bad; the message names them.
    pub const INVALID_ENVIRONMENT: Self = Self(4);
    /// Input or output failed.
    pub const IO: Self = Self(5);
    /// Something does not decode.
    pub const DECODING: Self = Self(6);
    /// The configuration decodes but is not valid.
    pub const INVALID_CONFIG: Self = Self(7);
    /// `CNI_NETNS` is the plugin's own namespace. Not in the specification; libcni defines it.
    pub const INVALID_NETNS: Self = Self(8);
    /// A passing condition: the same call may succeed later.
    pub const TRY_AGAIN: Self = Self(11);
    /// STATUS: the plugin cannot serve ADD.
    pub const NOT_AVAILABLE: Self = Self(50);
    /// STATUS: it cannot, and containers that are there may have lost connectivity.
    pub const NOT_AVAILABLE_LIMITED: Self = Self(51);
    /// A fault of the plugin itself. Not in the specification; libcni defines it.
    pub const INTERNAL: Self = Self(999);
}

/// What a failed call answers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{msg} (CNI code {})", .code.0)]
pub struct Error {
    /// The code.
    pub code: Code,
    /// One line: what failed and why.
    pub msg: String,
    /// More, if there is more to say: what to do next, a delegate's output.
    pub details: String,
}

impl Error {
    /// An error without details.
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// Adds details.
    #[must_use]
    pub fn details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Says first what was being done.
    #[must_use]
    pub fn during(mut self, what: &str) -> Self {
        self.msg = format!("{what}: {}", self.msg);
        self
    }

    /// The document that goes to stdout.
    #[must_use]
    pub fn to_json(&self, cni_version: &str) -> Value {
        let mut document = serde_json::json!({
            "cniVersion": cni_version,
            "code": self.code,
            "msg": self.msg,
        });
        if let (false, Some(map)) = (self.details.is_empty(), document.as_object_mut()) {
            map.insert("details".to_owned(), Value::String(self.details.clone()));
        }
        document
    }

    /// Reads the error that another plugin printed; `None` if it is no CNI error.
    ///
    /// A code of 0 means success in no version; it becomes [`Code::INTERNAL`].
    #[must_use]
    pub fn from_json(bytes: &[u8]) -> Option<Self> {
        let document: Value = serde_json::from_slice(bytes).ok()?;
        let text = |key| document.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let code = u32::try_from(document.get("code")?.as_u64()?).ok()?;
        let code = if code == 0 { Code::INTERNAL } else { Code(code) };
        Some(Self { code, msg: text("msg"), details: text("details") })
    }
}

/// What does not decode.
pub(crate) fn undecodable(what: &str, error: &serde_json::Error) -> Error {
    Error::new(Code::DECODING, format!("{what} does not decode: {error}"))
}
