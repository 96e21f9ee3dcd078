//! Binary blobs: their records. Their contents travel by HTTP.

use tapio_model::Value;

use crate::call::HandlersOf;
use crate::dates;
use crate::db::Db;

/// Registers the messages of blobs.
pub(crate) fn register(handlers: &mut HandlersOf<'_, Db>) {
    handlers.on("blob.create", |call, args| {
        let mime = match args.text(0)? {
            "" => "application/octet-stream",
            mime => mime,
        };
        let fields = [
            ("mime_type", mime.into()),
            ("public", args.bool(1)?.into()),
            ("last_updated", Value::DateTime(dates::now())),
        ];
        call.part.create("blob", &fields).map(Value::String)
    });
    handlers.on("blob.destroy", |call, args| {
        call.part.destroy("blob", args.text(0)?)?;
        Ok(Value::Void)
    });
}
