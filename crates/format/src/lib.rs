//! Image formats: raw and VHD; codecs, live mapping, offline tools.
