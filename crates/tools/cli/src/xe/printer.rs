//! Output as users of `xe` and their scripts know it.

use serde_json::{Map, Value};

/// One field of a record.
#[derive(Clone, Debug)]
pub struct Cell {
    /// As `name-label`.
    pub name: String,
    /// As ` ( RW)`.
    pub qualifier: &'static str,
    /// As text.
    pub text: String,
    /// As JSON.
    pub value: Value,
}

/// Columns between the longest name and the colon.
const MARGIN: usize = 4;

/// Records with names and qualifiers, two blank lines after each.
pub fn records(records: &[Vec<Cell>]) -> String {
    let mut text = String::new();
    for record in records {
        let name = |cell: &Cell| format!("{}{}", cell.name, cell.qualifier);
        let widest = record.iter().map(|cell| name(cell).chars().count()).max().unwrap_or(0);
        let width = MARGIN + widest;
        for (at, cell) in record.iter().enumerate() {
            let name = name(cell);
            text.push_str(&match at {
                0 => format!("{name:<width$}: {}\n", cell.text),
                _ => format!("{name:>width$}: {}\n", cell.text),
            });
        }
        text.push_str("\n\n");
    }
    text
}

/// The first field of each record, with commas.
pub fn minimal(records: &[Vec<Cell>]) -> String {
    let first: Vec<&str> = records.iter().filter_map(|record| Some(record.first()?.text.as_str())).collect();
    values_minimal(&first)
}

/// Values with commas between them; commas and backslashes in them get a backslash.
pub fn values_minimal(values: &[&str]) -> String {
    let escaped: Vec<String> =
        values.iter().map(|value| value.replace('\\', "\\\\").replace(',', "\\,")).collect();
    escaped.join(",") + "\n"
}

/// Records as JSON.
pub fn json(records: &[Vec<Cell>]) -> Value {
    let object = |record: &Vec<Cell>| {
        let pairs = record.iter().map(|cell| (cell.name.clone(), cell.value.clone()));
        Value::Object(pairs.collect::<Map<String, Value>>())
    };
    Value::Array(records.iter().map(object).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(name: &str, qualifier: &'static str, text: &str) -> Cell {
        Cell { name: name.into(), qualifier, text: text.into(), value: text.into() }
    }

    /// The example that its users know: the first name to the left, all others to the right.
    #[test]
    fn records_are_padded_to_the_letter() {
        let record = vec![
            cell("uuid", " ( RO)", "c67132ec-0b1f-3a69-0305-6450bfccd790"),
            cell("name-label", " ( RW)", "syed-sr"),
            cell("name-description", " ( RW)", "iSCSI SR [...]"),
            cell("host", " ( RO)", "coe-hq-xen08"),
            cell("type", " ( RO)", "lvmoiscsi"),
            cell("content-type", " ( RO)", ""),
        ];
        let expected = "\
uuid ( RO)                : c67132ec-0b1f-3a69-0305-6450bfccd790
          name-label ( RW): syed-sr
    name-description ( RW): iSCSI SR [...]
                host ( RO): coe-hq-xen08
                type ( RO): lvmoiscsi
        content-type ( RO): \n\n\n";
        assert_eq!(records(std::slice::from_ref(&record)), expected);
        assert_eq!(records(&[record.clone(), record]), format!("{expected}{expected}"));
        assert_eq!(records(&[]), "");
    }

    #[test]
    fn minimal_output_is_the_first_field() {
        let record = |text: &str| vec![cell("uuid", "", text), cell("name-label", "", "x")];
        assert_eq!(minimal(&[record("a"), record("b,c"), record("d\\")]), "a,b\\,c,d\\\\\n");
        assert_eq!(minimal(&[]), "\n");
    }
}
