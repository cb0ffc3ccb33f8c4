//! The chunked backward pass, linear in time and memory.
//!
//! With `dN_i = G_i / D_i` and `c_i = −dN_i·A_i`, the gradient of every weight is `dw_ij = dN_i·v_j + c_i`. Gradients of
//! queries and of the relative table visit the rows as the forward pass does; gradients of keys and values walk the keys
//! the other way, with the state `Σ φ(q_i) dN_iᵀ` of the rows that come later.
//!
//! The gradient of the final state is one more late row to the walk over the keys: that of `S` and `z` joins the state
//! after the last key, that of the far sum is a far row at the last position, that of the ring goes to the values that
//! are in it. The walk then goes on over the ring of the initial state, as keys at −1, −2, …, −R without content; what
//! its sums hold at key 0 and beyond −R are the gradients of `S` and `z` and of the far sum.

mod far_rows;
mod gates;
mod key_buffers;
mod key_pass;
mod key_piece;
mod key_walk;
mod query_pass;
mod row_sums;
mod source;
mod stages;
mod states;
mod table;

use key_walk::KeyWalk;
use query_pass::QueryGradients;
use row_sums::RowSums;
pub(super) use source::GradientSink;
use source::Source;
use stages::{memory, most_stages};

use super::features::PositionSink;
use super::problem::{Problem, Unit};
use super::row_pass::{Memory, RowPass, cut_count, first_row, whole_units};
use super::summary::places;
use super::tile::Sizes;
use crate::call::{self, Arena, Cotangent, Scratch, SharedRows, State};
use crate::simd::Real;
use crate::simd::rows::padded;
use crate::threads::parallel;
pub(super) use table::reduce_table;

pub(super) fn backward<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: call::GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    d_initial: Option<&mut State<T>>,
    scratch: &mut Scratch<T>,
) {
    let units = problem.units();
    let (parameters, gates) = match parameters {
        [others @ .., gate] if problem.attention.gate => {
            let keys = problem.dims.keys;
            (others, Some(SharedRows::new(gate, [problem.dims.kv_heads * keys, keys, 1])))
        }
        all => (all, None),
    };
    let group = problem.dims.group();
    let exp = problem.exponential;
    let longest = problem.sequences.iter().map(|s| s.queries).max().unwrap_or(0);
    let row_segments = |index: usize| -> usize { row_segments(problem, &problem.unit(index)) };
    // A unit whose rows all see nothing is visited too.
    let most_segments = (0..units).map(row_segments).max().unwrap_or(0).max(1);

    let entry = problem.table_width() * problem.head_width + problem.sums_len();
    let per_unit_table = most_segments * group * entry;
    let per_unit_shifts = if exp { group * padded::<T>(longest) } else { 0 };
    let chunk = Sizes::new(problem).chunk;
    let keys = memory(problem, chunk);
    let memory = Memory::new(problem, true);
    let stages = memory.pass(problem);
    let walks_len = stages.len(problem).max(keys.len(problem));
    let most_stages = most_stages(problem);
    let per_unit_sums = most_stages * problem.sums_len();
    let whole = whole_units(problem);
    let row_sums = RowSums::new(problem, most_segments, whole);
    let shared_len = units * (per_unit_table + per_unit_shifts + per_unit_sums + row_sums.len());
    let [query_positions, key_positions] = problem.position_lens();
    let shared_len = shared_len + query_positions + key_positions + 6 * padded::<T>(1);
    let mut arena = Arena::new(scratch.take(problem.table_len() + shared_len + walks_len));
    let table = problem.table(&mut arena);
    let table_gradients = arena.take(units * per_unit_table);
    let shifts = arena.take(units * per_unit_shifts);
    let key_sums = arena.take(units * per_unit_sums);
    key_sums.fill(T::ZERO);
    let all_row_sums = arena.take(units * row_sums.len());
    let (query_positions, key_positions) = (arena.take(query_positions), arena.take(key_positions));
    let scratch = arena.rest();
    let mut positions = problem.position_views(query_positions, key_positions);
    let sink = GradientSink { rows: sink, positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)) };
    let sums = SharedRows::new(&mut *key_sums, [per_unit_sums, problem.sums_len(), 0]);
    let source = Source { cotangent };

    all_row_sums.chunks_exact_mut(row_sums.len().max(1)).for_each(|unit| row_sums.clear(unit));
    let row_places = SharedRows::new(&mut *all_row_sums, [row_sums.len(), 0, 1]);
    let gradients = SharedRows::new(&mut *table_gradients, [per_unit_table, group * entry, 0]);
    let shifts = SharedRows::new(&mut *shifts, [per_unit_shifts, padded::<T>(longest), 1]);
    let visitor = |unit: usize, segment: usize| {
        // SAFETY: a unit's segment has one visitor at a time.
        let table = unsafe { gradients.row(unit, segment, 0, group * entry) };
        table.fill(T::ZERO);
        // SAFETY: as above; a unit's segments come in turn where one place serves them.
        let sums = unsafe { row_sums.place(&row_places, unit, segment) };
        QueryGradients { source, sink, table, shifts: (shifts, unit), state: None, sums }
    };
    let places = d_initial.map(|state| {
        state.numbers_mut().fill(T::ZERO);
        places(state)
    });
    let walk = |index: usize| {
        let unit = problem.unit(index);
        // SAFETY: a unit's keys are walked over once all its rows have been visited, which wrote these.
        let (shifts, all_rows) =
            unsafe { (shifts.read(index, 0, 0, per_unit_shifts), row_places.read(index, 0, 0, row_sums.len())) };
        KeyWalk {
            index,
            chunk,
            sums,
            problem,
            unit,
            table,
            source,
            sink,
            shifts,
            row_sums: (!all_rows.is_empty()).then(|| row_sums.total(all_rows)),
            gates,
            rows: true,
            initial: problem.call.initial_state.map(|state| unit.head(state)),
            d_initial: places.as_ref().map(|places| &places[index]),
            d_final: cotangent.final_state.map(|state| unit.head(state)),
        }
    };
    // One task takes the rows and then the keys of a unit, and finds them in its cache.
    let rows = RowPass { problem, memory, table, make: Some(&visitor), last: None };
    let per_worker = stages.per_worker.max(keys.per_worker);
    parallel(whole, scratch, per_worker, |index, scratch| {
        stages.unit(&rows.unit(index), scratch);
        keys.unit(&walk(index), scratch);
    });
    if whole < units {
        stages.run(problem, &|index| rows.unit(index), whole, scratch);
        for index in whole..units {
            // SAFETY: no visitor is left.
            let sums = unsafe { row_places.row(index, 0, 0, row_sums.len()) };
            row_sums.join(problem, row_segments(index), sums);
        }
        keys.run(problem, &walk, whole, scratch);
    }
    let query_sums = |index: usize, n: usize| {
        let unit = &table_gradients[index * per_unit_table..][..per_unit_table];
        let entries = (0..row_segments(index)).map(move |segment| &unit[(segment * group + n) * entry..][..entry]);
        entries.map(|entry| &entry[entry.len() - problem.sums_len()..]).collect()
    };
    let key_sums = |index: usize| {
        let len = problem.sums_len();
        (0..most_stages).map(|n| &key_sums[index * per_unit_sums + n * len..][..len]).collect()
    };
    problem.write_feature_gradients(&query_sums, &key_sums, [query_positions, key_positions], false, parameters);
    if let Some(table) = &table {
        reduce_table(problem, table, table_gradients, per_unit_table, &row_segments, parameters);
    }
}

fn row_segments<T: Real>(problem: &Problem<'_, T>, unit: &Unit<'_, T>) -> usize {
    cut_count(problem, unit.sequence.queries - first_row(problem, unit))
}

/// Adds what the final state hands back to the gradients of keys and values that another algorithm wrote.
pub(super) fn add_final_state<T: Real>(
    problem: &Problem<'_, T>,
    cotangent: &Cotangent<'_, T>,
    sink: call::GradientSink<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let chunk = Sizes::new(problem).chunk;
    let keys = memory(problem, chunk);
    let stages = most_stages(problem);
    let sums_len = problem.sums_len();
    let [_, positions_len] = problem.position_lens();
    let shared = problem.units() * stages * sums_len + positions_len + 2 * padded::<T>(1);
    let mut arena = Arena::new(scratch.take(problem.table_len() + shared + keys.len(problem)));
    let table = problem.table(&mut arena);
    let key_sums = arena.take(problem.units() * stages * sums_len);
    key_sums.fill(T::ZERO);
    let key_positions = arena.take(positions_len);
    let mut positions = problem.position_views(&mut [], key_positions);
    let sink = GradientSink { rows: sink, positions: positions.as_mut().map(|[q, k]| PositionSink::new(q, k)) };
    let sums = SharedRows::new(&mut *key_sums, [stages * sums_len, sums_len, 0]);
    let walk = |index: usize| {
        let unit = problem.unit(index);
        let d_final = cotangent.final_state.map(|state| unit.head(state));
        let (source, shifts) = (Source { cotangent }, &[][..]);
        KeyWalk {
            index,
            chunk,
            sums,
            problem,
            unit,
            table,
            source,
            sink,
            shifts,
            row_sums: None,
            gates: None,
            rows: false,
            initial: None,
            d_initial: None,
            d_final,
        }
    };
    keys.run(problem, &walk, 0, arena.rest());
    let key_sums =
        |index: usize| (0..stages).map(|n| &key_sums[(index * stages + n) * sums_len..][..sums_len]).collect();
    problem.write_feature_gradients(&|_, _| Vec::new(), &key_sums, [&[], key_positions], true, parameters);
}
