//! How long the data thread may take.

use std::time::Duration;

/// How long the data thread may take for something small.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long opening or closing images may take: repairs read what they must, on a slow storage.
pub const IMAGES_TIMEOUT: Duration = Duration::from_secs(300);
