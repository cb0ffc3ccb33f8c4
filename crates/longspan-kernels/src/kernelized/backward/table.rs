//! The gradient of the table of relative positions, from those that the units and segments left.

use super::super::problem::{Problem, Table};
use crate::feature_map::elementwise::{PullBackFeatures, copy_rows};
use crate::feature_map::rows::{RawRows, RowMap, Side as MapSide};
use crate::shaw::RelativeMap;
use crate::simd::block::{add_scaled, store};
use crate::simd::rows::Rows;
use crate::simd::{Real, dispatch};

/// Adds up the table's gradients of all units and segments, in a fixed order, and takes them through the feature map, to
/// whose own, the last of `parameters`, they add what it learns from the table.
pub(in crate::kernelized) fn reduce_table<T: Real>(
    problem: &Problem<'_, T>,
    table: &Table<'_, T>,
    gradients: &mut [T],
    per_unit: usize,
    segments: &dyn Fn(usize) -> usize,
    parameters: &mut [&mut [T]],
) {
    let (Some(shaw), [d_table, others @ ..]) = (problem.attention.score.shaw(), parameters) else { return };
    let (head_width, table_dim) = (problem.head_width, problem.table_dim());
    let len = table.width * head_width;
    let entry = len + problem.sums_len();
    let group = problem.dims.group();
    d_table.fill(T::ZERO);
    if shaw.map == RelativeMap::Same
        && let Some(map) = &problem.mapping.rows
    {
        reduce_mapped_table(problem, map, table, gradients, per_unit, segments, (d_table, others.last_mut()));
        return;
    }
    for index in 0..problem.units() {
        let unit = problem.unit(index);
        for segment in 0..segments(index) {
            for (n, head) in problem.heads(&unit).enumerate() {
                let from = &gradients[index * per_unit + (segment * group + n) * entry..][..entry];
                let to = if shaw.shared { 0 } else { head } * shaw.rows() * table_dim;
                for row in 0..table.count {
                    let to = &mut d_table[to + row * table_dim..][..table_dim];
                    add_scaled(to, T::ONE, &from[row * head_width..]);
                }
            }
        }
    }
    if shaw.map == RelativeMap::Identity {
        return;
    }
    // One entry of the gradients' memory is free to bring a table's rows to block form; without units all is 0 anyway.
    let Some(block) = gradients.get_mut(..len) else { return };
    let tables = if shaw.shared { 1 } else { problem.dims.heads };
    for index in 0..tables {
        let raw = Rows { data: &problem.parameters[0][index * shaw.rows() * table_dim..], stride: table_dim };
        let d = &mut d_table[index * shaw.rows() * table_dim..][..table.count * table_dim];
        let from = Rows { data: &*d, stride: table_dim };
        copy_rows(from, (table.count, table_dim), None, (block, head_width));
        dispatch(PullBackFeatures {
            map: problem.map,
            x: raw,
            phi: table.rows(index),
            d: block,
            count: table.count,
            width: table_dim,
            row_length: head_width,
        });
        for row in 0..table.count {
            store(&block[row * head_width..], T::ONE, &mut d[row * table_dim..][..table_dim]);
        }
    }
}

/// The same through a map of whole rows: a table's gradients are added up as those of features, in the place of the
/// first of them, and a row at a time goes back from there.
fn reduce_mapped_table<T: Real>(
    problem: &Problem<'_, T>,
    map: &RowMap<'_, T>,
    table: &Table<'_, T>,
    gradients: &mut [T],
    per_unit: usize,
    segments: &dyn Fn(usize) -> usize,
    (d_table, mut d_map): (&mut [T], Option<&mut &mut [T]>),
) {
    let Some(shaw) = problem.attention.score.shaw() else { return };
    let (head_width, head_dim, group) = (problem.head_width, problem.dims.head_dim, problem.dims.group());
    let len = table.width * head_width;
    let entry = len + problem.sums_len();
    let mut work = vec![T::ZERO; map.work_len(1) + map.raw_width() + map.sums_len()];
    let (dx, work) = work.split_at_mut(map.raw_width());
    let (sums, work) = work.split_at_mut(map.sums_len());
    let (tables, heads) = problem.tables(shaw);
    for index in 0..tables {
        let mut first = None;
        for unit in 0..problem.units() {
            for segment in 0..segments(unit) {
                for (n, head) in problem.heads(&problem.unit(unit)).enumerate() {
                    if table.of(head) != index {
                        continue;
                    }
                    let at = unit * per_unit + (segment * group + n) * entry;
                    let Some(first) = first else {
                        first = Some(at);
                        continue;
                    };
                    let (to, from) = gradients.split_at_mut(at);
                    add_scaled(&mut to[first..][..len], T::ONE, &from[..len]);
                }
            }
        }
        let Some(first) = first else { continue };
        let (given, side) = (if shaw.shared { 0 } else { index }, MapSide::Key(index * heads / group));
        sums.fill(T::ZERO);
        for row in 0..table.count {
            let place = (given * shaw.rows() + row) * head_dim;
            let raw = RawRows::one(side, &problem.parameters[0][place..][..head_dim]);
            let d = &mut gradients[first + row * head_width..][..head_width];
            if d.iter().all(|&d| d == T::ZERO) {
                // What stands in a row that no distance has must not reach the map's gradient.
                continue;
            }
            let phi = &table.rows(index * heads)[row * head_width..][..head_width];
            map.pull_back(raw, phi, (d, head_width), dx, sums, work);
            add_scaled(&mut d_table[place..][..head_dim], T::ONE, dx);
        }
        if let (MapSide::Key(kv_head), Some(d_map), false) = (side, &mut d_map, sums.is_empty()) {
            map.write_gradient(std::iter::once(&*sums), kv_head, true, d_map);
        }
    }
}
