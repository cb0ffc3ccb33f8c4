//! Gradients by transforms. Blocks of queries, blocks of keys and distances in which a certificate fails go by tiles; those
//! of an image's keys and distances do so altogether if any fails.

use realfft::num_complex::Complex;

use super::super::backward::{Backward, Pass, Sizes};
use super::super::bias_gradient::{line_len, unit_lines};
use super::super::chunks::{RowChunk, push_chunks, push_unit};
use super::super::key_pass::{self, KeyPass};
use super::super::left::Left;
use super::super::problem::{CHUNK, Problem, TILE, Unit};
use super::super::query_pass;
use super::columns::{Columns, Keys, Norms, block, load_queries};
use super::line::{Kernel, Line, Work, complex, lines, most};
use super::spectrum::AddConjugateProducts;
use super::{allowed, clear, lost, norm, norm_of, transforms};
use crate::call::{Arena, Scratch, SharedRows};
use crate::feature_map::elementwise::Shift;
use crate::feature_map::mapping::MapBuffers;
use crate::simd::block::add_scaled;
use crate::simd::rows::pieces;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Tasks that features or values are dealt to: each keeps a spectrum of its own.
const GROUPS: usize = 8;

pub(in super::super) fn backward<T: Real>(
    call: Backward<'_, '_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let problem = call.problem;
    let lines = lines(problem);
    let unit_len = most(&lines, |line, arena| Buffers::new(problem, line, arena));
    let per_transform = most(&lines, |line, arena| (line.work(arena), line.work(arena)));
    let own_f64 = unit_len + threads::count() * per_transform;
    let per_worker = query_pass::worker_len(problem, false).max(key_pass::worker_len(problem, false));
    let sizes = Sizes { per_worker, own: 0, own_f64 };
    call.run(parameters, sizes, scratch, |pass, mut memory| {
        let (mut chunks, mut units) = (Vec::new(), Vec::new());
        for unit in (0..problem.units()).map(|index| problem.unit(index)) {
            let index = unit.index;
            let line = lines[index / problem.dims.kv_heads].as_ref().filter(|_| transforms(problem, &unit));
            let Some(line) = line else {
                push_unit(problem, &mut chunks, &unit, CHUNK);
                units.push((index, None));
                continue;
            };
            let d_lines = unit_lines(problem, memory.lines, index);
            let whole = Whole { pass, unit, line, per_transform };
            match whole.compute(&mut chunks, d_lines, memory.workers, memory.own_f64) {
                None => units.push((index, None)),
                Some(left) if left.any() => units.push((index, Some(left))),
                Some(_) => {}
            }
        }
        memory.own_f64 = &mut [];
        query_pass::run(pass, chunks, None, (&mut *memory.workers, per_worker));
        KeyPass { pass, rows: None }.run(&units, memory);
    });
}

/// What one unit takes beside the memory of tasks.
struct Buffers<'s> {
    work: Work<'s>,
    keys: Keys<'s>,
    heads: Vec<HeadColumns<'s>>,
    sums: Sums<'s>,
    /// Gradients of features and values.
    dk: Columns<'s>,
    dv: Columns<'s>,
    dq: Columns<'s>,
    /// A spectrum for each of [`GROUPS`].
    spectra: &'s mut [f64],
}

/// What one query head brings into the gradients of its unit.
struct HeadColumns<'s> {
    kernel: Kernel<'s>,
    q: Columns<'s>,
    /// `dN⁺_i` relative to the kernel's largest factor, (values + 1) × queries.
    d: Columns<'s>,
    /// `‖q̄_i‖` and `‖dN⁺_i‖`.
    norms: Norms<'s>,
}

/// Working memory for sums that are taken once a head.
struct Sums<'s> {
    keys: &'s mut [f64],
    queries: &'s mut [f64],
    spectrum: &'s mut [f64],
    pairs: [&'s mut [f64]; 2],
}

impl<'s> Buffers<'s> {
    fn new<T: Real>(problem: &Problem<'_, T>, line: &Line, arena: &mut Arena<'s, f64>) -> Self {
        let (features, value_dim) = (problem.features, problem.dims.value_dim);
        let (keys, queries, spectrum_len) = (line.keys.count, line.queries.count, line.spectrum_len());
        let mut head = |_| HeadColumns {
            kernel: Kernel::new(line, arena),
            q: Columns::new(features, queries, arena),
            d: Columns::new(value_dim + 1, queries, arena),
            norms: Norms::new(queries, arena),
        };
        let heads = (0..problem.dims.group()).map(&mut head).collect();
        Self {
            heads,
            work: line.work(arena),
            keys: Keys::new(problem, line, arena),
            sums: Sums {
                keys: arena.take(keys),
                queries: arena.take(queries),
                spectrum: arena.take(spectrum_len),
                pairs: [arena.take(line.length), arena.take(line.length)],
            },
            dk: Columns::new(features, keys, arena),
            dv: Columns::new(value_dim, keys, arena),
            dq: Columns::new(features, queries, arena),
            spectra: arena.take(GROUPS * spectrum_len),
        }
    }
}

struct Whole<'x, 'a, T: 'static> {
    pass: &'x Pass<'x, 'a, T>,
    unit: Unit<'a, T>,
    line: &'x Line,
    /// Numbers of working memory of a task of transforms.
    per_transform: usize,
}

impl<T: Real> Whole<'_, '_, T> {
    /// Computes the gradients of queries, but for those that it adds to `chunks`, and, unless it gives `None`, of keys,
    /// values and biases but for those that it gives.
    fn compute(
        &self,
        chunks: &mut Vec<RowChunk>,
        lines: &mut [T],
        memory: &mut [T],
        memory_f64: &mut [f64],
    ) -> Option<Left> {
        let (Self { pass, unit, line, .. }, problem) = (self, self.pass.call.problem);
        let mut arena = Arena::new(memory_f64);
        let Buffers { mut work, mut keys, mut heads, mut sums, mut dk, mut dv, mut dq, spectra } =
            Buffers::new(problem, line, &mut arena);
        let rest = arena.rest();
        keys.load(problem, unit, memory);
        for (head, HeadColumns { kernel, q, d, norms }) in problem.heads(unit).zip(&mut heads) {
            kernel.load(problem, line, pass.shared.line(head), &mut work);
            load_queries(problem, (unit, head), memory, q);
            self.load_cotangent(head, kernel.largest + keys.exponent, memory, d);
            norms.load(q, d);
        }
        let mut failing = vec![false; line.keys.count];
        let distances: Option<Vec<Vec<bool>>> =
            heads.iter().map(|columns| self.certify(&keys, columns, &mut failing, &mut sums, &mut work)).collect();
        let left = distances.map(|distances| Left { keys: failing, distances });
        // What is left of an image would be scattered over its tiles; under `exp` a key that fails may have lost, beside the
        // largest, what it brings to distances that do not.
        let whole = problem.is_grid() || problem.mapping.exponential;
        let left = left.filter(|left| !whole || !left.any());
        let certified = left.is_some();
        dk.numbers.fill(0.0);
        for (n, (head, columns)) in problem.heads(unit).zip(&heads).enumerate() {
            self.features(&keys, columns, &mut dq, certified.then_some((&mut dk, &mut *spectra)), rest);
            self.write_queries(head, &keys, columns, &mut dq, (chunks, memory), &mut sums, &mut work);
            if let Some(left) = &left {
                let d_line = &mut lines[n * line_len(problem)..][..problem.line_width()];
                self.biases((n, head), &keys, columns, spectra, left, d_line, &mut work);
            }
        }
        if let Some(left) = &left {
            self.values(&keys, &heads, &mut dv, rest);
            self.write_keys(&keys, &heads, left, &mut dk, &mut dv, memory);
        }
        left
    }

    /// Marks the keys of a head that lose digits in their gradients, and gives marks for the distances that do, by index
    /// of the head's line: what transforms may lose is compared with sums of norms, themselves correlated by transforms.
    /// `None` if there are numbers that are not finite, or norms that overflow: these say nothing of any key.
    fn certify(
        &self,
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        failing: &mut [bool],
        sums: &mut Sums<'_>,
        work: &mut Work<'_>,
    ) -> Option<Vec<bool>> {
        let (Self { unit, line, .. }, problem) = (self, self.pass.call.problem);
        if !columns.q.numbers.iter().chain(&*columns.d.numbers).all(|x| x.is_finite()) {
            return None;
        }
        let allowed = allowed::<T>(line);
        let (of_keys, of_rows) = (&*keys.norms.products, &*columns.norms.products);
        line.sum(&columns.kernel, true, of_rows, sums.keys, work);
        let bound = lost(line, &columns.kernel) * norm(of_rows);
        let of_distances = line.rounding() * norm(of_keys) * norm(of_rows);
        if !bound.is_finite() || !of_distances.is_finite() {
            return None;
        }
        for (key, (failing, &scale)) in failing.iter_mut().zip(&*sums.keys).enumerate() {
            let there = problem.is_seen(unit, key);
            // An exponential of 0 was a number before it was taken relative to the largest.
            let faded = problem.mapping.exponential && keys.norms.first[key].powi(2) < T::MIN_POSITIVE.to_f64();
            *failing |= there && faded;
            let counts = there && of_keys[key] != 0.0;
            // A scale that is NaN passes nothing.
            let passes = bound <= allowed * scale.abs();
            *failing |= counts && !passes;
        }
        // Distances: how many pairs have one at all is a whole number, which no transform loses.
        let sign = |x: &[f64], to: &mut [f64]| {
            to.iter_mut().zip(x).for_each(|(to, &x)| *to = if x > 0.0 { 1.0 } else { 0.0 });
        };
        sign(of_keys, sums.keys);
        sign(of_rows, sums.queries);
        let [pairs, scales] = &mut sums.pairs;
        line.pairs(sums.keys, sums.queries, work, sums.spectrum, pairs);
        line.pairs(of_keys, of_rows, work, sums.spectrum, scales);
        let mut marks = vec![false; problem.line_width()];
        for difference in line.differences() {
            let at = line.kernel_index(difference);
            let index = usize::try_from(problem.line_index(difference)).ok();
            let index = index.filter(|&index| problem.line_difference(index).is_some());
            if let Some(mark) = index.and_then(|index| marks.get_mut(index)) {
                let passes = of_distances <= allowed * scales[at];
                *mark = pairs[at].round() != 0.0 && !passes;
            }
        }
        Some(marks)
    }

    /// Gradients of mapped queries; with `more` those of mapped keys too, which are added, and the spectrum of those of
    /// the biases, which comes first of [`GROUPS`].
    fn features(
        &self,
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        dq: &mut Columns<'_>,
        more: Option<(&mut Columns<'_>, &mut [f64])>,
        memory: &mut [f64],
    ) {
        let (line, problem) = (self.line, self.pass.call.problem);
        let HeadColumns { kernel, q, d, .. } = columns;
        let (key_count, query_count, spectrum_len) = (line.keys.count, line.queries.count, line.spectrum_len());
        let (features, value_dim) = (problem.features, problem.dims.value_dim);
        let width = features.div_ceil(GROUPS).max(1);
        let groups = features.div_ceil(width);
        let dq = SharedRows::new(&mut *dq.numbers, [query_count, 0, 0]);
        let more = more.map(|(dk, spectra)| {
            (SharedRows::new(&mut *dk.numbers, [key_count, 0, 0]), SharedRows::new(spectra, [spectrum_len, 0, 0]))
        });
        parallel(groups, memory, self.per_transform, |group, memory| {
            let mut arena = Arena::new(memory);
            let (mut work, mut other) = (line.work(&mut arena), line.work(&mut arena));
            // SAFETY: each group has a spectrum of its own.
            let mut bias = more.as_ref().map(|(_, spectra)| complex(unsafe { spectra.row(group, 0, 0, spectrum_len) }));
            if let Some(bias) = &mut bias {
                bias.fill(Complex::default());
            }
            for feature in group * width..((group + 1) * width).min(features) {
                // SAFETY: each feature is one group's own.
                let dq = unsafe { dq.row(feature, 0, 0, query_count) };
                // SAFETY: as above.
                let mut dk = more.as_ref().map(|(dk, _)| unsafe { dk.row(feature, 0, 0, key_count) });
                dq.fill(0.0);
                for value in 0..=value_dim {
                    line.transform(&line.keys, keys.k.column(feature), Some(keys.v.column(value)), &mut work);
                    if let (Some(dk), Some(bias)) = (&mut dk, &mut bias) {
                        line.transform(&line.queries, q.column(feature), Some(d.column(value)), &mut other);
                        dispatch(AddConjugateProducts { to: bias, x: work.spectrum, y: other.spectrum });
                        line.convolve(kernel, true, &mut other);
                        line.keys.add(Some(keys.v.column(value)), other.signal, dk);
                    }
                    line.convolve(kernel, false, &mut work);
                    line.queries.add(Some(d.column(value)), work.signal, dq);
                }
            }
        });
        if let Some((_, spectra)) = &more {
            for group in 1..groups {
                // SAFETY: two rows of one thread's.
                let (to, from) =
                    unsafe { (spectra.row(0, 0, 0, spectrum_len), spectra.row(group, 0, 0, spectrum_len)) };
                add_scaled(to, 1.0, from);
            }
        }
    }

    /// The gradients of the biases of the `n`-th head from their spectrum.
    #[allow(clippy::too_many_arguments)]
    fn biases(
        &self,
        (n, head): (usize, usize),
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        spectrum: &mut [f64],
        left: &Left,
        d_line: &mut [T],
        work: &mut Work<'_>,
    ) {
        let (line, problem) = (self.line, self.pass.call.problem);
        if problem.features == 0 {
            return;
        }
        work.spectrum.copy_from_slice(complex(&mut spectrum[..line.spectrum_len()]));
        line.inverse(work);
        let bound = line.rounding() * norm(keys.norms.products) * norm(columns.norms.products);
        for difference in line.differences() {
            let index = problem.line_index(difference);
            let place = usize::try_from(index).ok().filter(|&index| !left.distance(n, index));
            if let Some(to) = place.and_then(|index| d_line.get_mut(index)) {
                let mut sum = work.signal[line.kernel_index(difference)] / line.length as f64;
                clear(&mut sum, bound);
                let b = self.pass.shared.line(head)[index as usize].to_f64();
                *to = T::from_f64((b - columns.kernel.largest).exp() * sum);
            }
        }
    }

    fn values(&self, keys: &Keys<'_>, heads: &[HeadColumns<'_>], dv: &mut Columns<'_>, memory: &mut [f64]) {
        let (line, problem) = (self.line, self.pass.call.problem);
        let places = SharedRows::new(&mut *dv.numbers, [line.keys.count, 0, 0]);
        parallel(problem.dims.value_dim, memory, self.per_transform, |value, memory| {
            let mut work = line.work(&mut Arena::new(memory));
            // SAFETY: each column is one task's own.
            let to = unsafe { places.row(value, 0, 0, line.keys.count) };
            to.fill(0.0);
            for columns in heads {
                for feature in 0..problem.features {
                    let (q, d) = (columns.q.column(feature), columns.d.column(value));
                    line.transform(&line.queries, q, Some(d), &mut work);
                    line.convolve(&columns.kernel, true, &mut work);
                    line.keys.add(Some(keys.k.column(feature)), work.signal, to);
                }
            }
        });
    }

    /// Loads `dN⁺` of every row of a head, relative to an exponent.
    fn load_cotangent(&self, head: usize, exponent: f64, memory: &mut [T], columns: &mut Columns<'_>) {
        let (Self { pass, unit, .. }, problem) = (self, self.pass.call.problem);
        let (block, map) = block(problem, memory);
        let (queries, value_dim) = (unit.sequence.queries, problem.dims.value_dim);
        let (mut c, mut shifts) = ([T::ZERO; TILE], [T::ZERO; TILE]);
        for first in (0..queries).step_by(TILE) {
            let rows = first..(first + TILE).min(queries);
            let raw = problem.queries(unit, head).skip(first);
            problem.mapping.query_shifts(head, raw, rows.len(), &mut shifts, map.work);
            pass.load_cotangent((unit, head), rows.clone(), &shifts, (block, &mut c));
            columns.put((first, rows.len()), (block, problem.value_width), value_dim);
            for row in rows {
                columns.numbers[value_dim * queries + row] = c[row - first].to_f64();
                let scale = (exponent - pass.shared.level(unit, head, row).to_f64()).exp();
                for value in 0..=value_dim {
                    let number = &mut columns.numbers[value * queries + row];
                    // 0 stays 0 however large the scale.
                    *number = if *number == 0.0 { 0.0 } else { *number * scale };
                }
            }
        }
    }

    /// Writes the gradients of one head's queries from those of their features, or leaves them to tiles. Whether it
    /// does depends on keys and values and on the rows of a block alone.
    #[allow(clippy::too_many_arguments)]
    fn write_queries(
        &self,
        head: usize,
        keys: &Keys<'_>,
        columns: &HeadColumns<'_>,
        dq: &mut Columns<'_>,
        (chunks, memory): (&mut Vec<RowChunk>, &mut [T]),
        sums: &mut Sums<'_>,
        work: &mut Work<'_>,
    ) {
        let (Self { pass, unit, line, .. }, problem) = (self, self.pass.call.problem);
        let lost = lost(line, &columns.kernel);
        let bound = |feature| lost * norm_of(keys.k.column(feature), keys.norms.second);
        dq.clear(bound, columns.norms.second);
        let scales = &mut *sums.queries;
        line.sum(&columns.kernel, false, keys.norms.products, scales, work);
        let bound = lost * norm(keys.norms.products) / allowed::<T>(line);

        let width = problem.head_width;
        let mut arena = Arena::new(memory);
        let (phi, block) = (arena.take(TILE * width), arena.take(TILE * width));
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        // SAFETY: the tasks that share it come later.
        let map_sums = unsafe { pass.map_sums.of_queries(unit.index, head, 0) };
        let mut shifts = [T::ZERO; TILE];
        for rows in pieces(0..dq.count, TILE) {
            let mut all = rows.0..rows.0 + rows.1;
            if all.any(|row| problem.sees(unit, row) && bound > scales[row].abs()) {
                push_chunks(chunks, (unit.index, head), rows.0..rows.0 + rows.1, CHUNK);
                continue;
            }
            problem.load_queries((unit, head), rows, (phi, &mut shifts), &mut map);
            dq.take(rows, (block, width));
            problem.write_queries((unit, head), rows, (phi, block), map_sums, &mut map, pass.call.sink);
        }
    }

    /// Writes the gradients of the unit's keys and values, but for the blocks of keys that tiles take.
    fn write_keys(
        &self,
        keys: &Keys<'_>,
        heads: &[HeadColumns<'_>],
        left: &Left,
        dk: &mut Columns<'_>,
        dv: &mut Columns<'_>,
        memory: &mut [T],
    ) {
        let (Self { pass, unit, line, .. }, problem) = (self, self.pass.call.problem);
        let (head_width, value_width) = (problem.head_width, problem.value_width);
        let bound = |of_head: &dyn Fn(&HeadColumns<'_>) -> f64| {
            heads.iter().map(|columns| lost(line, &columns.kernel) * of_head(columns)).sum::<f64>()
        };
        let of_feature = |feature| bound(&|of| norm_of(of.q.column(feature), of.norms.second));
        dk.clear(of_feature, keys.norms.second);
        let of_value = |value| bound(&|of| norm_of(of.d.column(value), of.norms.first));
        dv.clear(of_value, keys.norms.first);
        let mut arena = Arena::new(memory);
        let (phi, d_k) = (arena.take(TILE * head_width), arena.take(TILE * head_width));
        let d_v = arena.take(TILE * value_width);
        let mut map = MapBuffers::new(&problem.mapping, TILE, &mut arena);
        // SAFETY: the tasks that share it come later.
        let map_sums = unsafe { pass.map_sums.of_keys(unit.index, 0) };
        for rows in pieces(0..dk.count, TILE) {
            if left.keys(rows.0, rows.1) {
                continue;
            }
            problem.load_keys(unit, rows, Shift::One(T::from_f64(keys.exponent)), phi, &mut map);
            dk.take(rows, (d_k, head_width));
            dv.take(rows, (d_v, value_width));
            let counts = |key: usize| problem.is_seen(unit, key);
            problem.write_keys(unit, rows, counts, (phi, d_k), Some(d_v), map_sums, &mut map, pass.call.sink);
        }
    }
}
