//! Chains of images, requests and their stages, the life of a plugged disk.
