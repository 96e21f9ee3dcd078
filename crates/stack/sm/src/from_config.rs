//! What attaches a VDI where there is no database, as XenServer's storage manager takes it: the call
//! `vdi_attach_from_config` as XML-RPC, whose one parameter says how the SR is reached and which VDI is meant
//! (`VDI.generate_config`).

use uuid::Uuid;

use crate::external::v1::xml::{Value, call};
use crate::traits::Config;

/// The method, and the command that its parameter names again.
const METHOD: &str = "vdi_attach_from_config";

/// The call for a VDI of an SR.
pub fn attach_call(sr: Uuid, vdi: Uuid, device_config: &Config) -> String {
    let members = [
        ("device_config", Value::texts(device_config.clone())),
        ("sr_uuid", Value::text(sr.to_string())),
        ("vdi_uuid", Value::text(vdi.to_string())),
        ("command", Value::text(METHOD)),
    ];
    call(METHOD, &Value::Struct(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_says_all_in_one_structure() {
        let config = Config::from([("location".to_owned(), "/a&b".to_owned())]);
        let text = attach_call(Uuid::from_u128(1), Uuid::from_u128(2), &config);
        for part in [
            "<methodName>vdi_attach_from_config</methodName><params><param><value><struct>",
            "<name>command</name><value><string>vdi_attach_from_config</string></value>",
            "<name>location</name><value><string>/a&amp;b</string></value>",
            "<name>sr_uuid</name><value><string>00000000-0000-0000-0000-000000000001</string></value>",
            "<name>vdi_uuid</name><value><string>00000000-0000-0000-0000-000000000002</string></value>",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
