//! A profile as text, as pictures, and as one page that contains them.

mod page;
mod pictures;
mod text;

pub use page::page;
pub use pictures::{Picture, pictures};
pub use text::text;
