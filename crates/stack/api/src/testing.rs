//! Values for the property tests of both codecs.

use proptest::prelude::*;
use tapio_model::Value;

/// Any value that both codecs can carry: four levels, texts of characters that XML has.
pub(crate) fn values(floats: impl Strategy<Value = f64> + 'static) -> impl Strategy<Value = Value> {
    let text = "[\t\n\r -~äß€\u{10348}]{0,12}";
    let leaf = prop_oneof![
        Just(Value::Void),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        floats.prop_map(Value::Float),
        text.prop_map(Value::String),
        (0_i64..253_402_300_799).prop_map(Value::DateTime),
    ];
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Set),
            prop::collection::btree_map(text, inner, 0..6).prop_map(Value::Map),
        ]
    })
}
