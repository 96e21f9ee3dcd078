//! Which ways of moving a guest's data are safe on which storage.
//!
//! A page that is only mapped stays the guest's. Storage at the other end of a network may be sent such a page
//! again after the request was answered: a lost acknowledgement is enough. By then the guest uses the page for
//! something else, which goes to the storage in place of the data, or the page is not mapped any more, and the
//! host's kernel reads nothing. So `map` and `persistent` are refused there; `copy`, the default, and `bounce` give
//! the storage memory of this process.

use tapio_control::{BlkifFront, ControlError, Errno, Result};
use tapio_types::{ChainSpec, LayerSpec};

use crate::beneath::Sources;
use crate::blkif::maps_pages;
use crate::host_disk::HostDisk;

fn refused(what: &str, why: &str) -> ControlError {
    let text = format!(
        "{what}: its data goes over a network ({why}), where the kernel may send a mapped page again after the guest \
         has taken it back"
    );
    ControlError::new(Errno::EOPNOTSUPP, text)
}

impl HostDisk {
    /// Refuses a device that maps its guest's pages where the disk's storage is reached over a network. Gives why a
    /// device of another kind may not map them.
    pub(crate) fn check_movement(&self, front: &BlkifFront) -> Result<Option<String>> {
        let mut used: Vec<ChainSpec> = self.ask_status()?.spec.into_iter().collect();
        used.extend(self.mirror_target()?);
        used.extend(self.standby.lock().as_ref().map(|standby| alone(standby.image.clone())));
        match used.iter().find_map(|chain| Sources::default().network_of(chain)) {
            Some(why) if maps_pages(front.movement) => {
                let what = format!("{front} cannot have its pages moved by '{}'", front.movement.name());
                Err(refused(&what, &why).next("use 'copy'"))
            }
            why => Ok(why),
        }
    }

    /// Refuses images at the other end of a network for a disk that maps its guest's pages.
    pub(crate) fn check_images(&self, chain: &ChainSpec) -> Result<()> {
        let Some(front) = self.fronts.mapped() else { return Ok(()) };
        match Sources::default().network_of(chain) {
            Some(why) => {
                let what =
                    format!("the disk cannot go on with these images while {front} maps its guest's pages");
                Err(refused(&what, &why).next("connect the device again with the movement 'copy'"))
            }
            None => Ok(()),
        }
    }
}

/// A chain of one image.
pub(crate) fn alone(layer: LayerSpec) -> ChainSpec {
    ChainSpec { layers: vec![layer], access: tapio_types::Access::ReadWrite }
}

#[cfg(test)]
mod tests {
    use tapio_types::Movement;

    use super::*;

    #[test]
    fn a_refusal_names_the_device_the_storage_and_the_next_step() {
        let error =
            refused("5/51712 cannot have its pages moved by 'map'", "aio:/nfs/a: nfs").next("use 'copy'");
        assert_eq!(error.errno, Errno::EOPNOTSUPP);
        let text = error.to_string();
        assert!(text.contains("5/51712") && text.contains("/nfs/a") && text.contains("copy"), "{text}");
        assert_eq!(
            [Movement::Copy, Movement::Bounce, Movement::Map, Movement::Persistent].map(maps_pages),
            [false, false, true, true]
        );
    }
}
