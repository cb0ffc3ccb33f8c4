//! Gradients of AFT-conv, in two walks as for the other variants. A pair's weight is one number, so that the first one needs
//! no values: exponents and weights of all rows come from keys alone.

use super::walk::{Work, add_tap_gradients, clear, header, join, sum, walk};
use super::{Geometry, KeySource, RowSource, band, kernel, parallel_chunks};
use crate::aft::backward::{BLOCK_NUMBERS, GROUPS, GradientSink};
use crate::aft::conv::window::{AddRowDot, ExpAll, GatedCotangents, KeyGradients};
use crate::aft::problem::{Bias, Block, CHUNK, Chunks, Problem, Window};
use crate::aft::running::{OutputRows, TokenGradients};
use crate::aft::state::Head;
use crate::aft::state_gradient::Links;
use crate::aft::{Variant, kernel as reparametrized};
use crate::call::{Arena, Cotangent, Scratch, SharedRows, View, ViewMut};
use crate::simd::block::{floor, scale_by};
use crate::simd::rows::Ahead;
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Numbers that a block keeps, up to which a thread of its own has it.
const BLOCK_ALONE: usize = 1 << 20;

/// A block with its lines.
struct Sides {
    block: Block,
    /// Of queries, on keys.
    queries: Vec<Window>,
    /// Of keys, on queries.
    keys: Vec<Window>,
}

impl Sides {
    fn heads<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        self.block.heads.len() * problem.dims.group()
    }

    /// Rows of all units.
    fn rows<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let queries = problem.sequences[self.block.sequences.clone()].iter().map(|s| s.queries).sum::<usize>();
        queries * self.heads(problem)
    }

    /// Numbers of memory beside that of workers.
    fn memory<T: Real>(&self, problem: &Problem<'_, T>, geometry: &Geometry) -> usize {
        let rows = self.rows(problem) * (problem.width + 3) + 4 * 64;
        let edges = geometry.edges_len::<T>(&self.queries, self.block.heads.len(), 0)
            + geometry.edges_len::<T>(&self.keys, self.heads(problem), problem.width);
        rows + edges + 2 * 64
    }
}

/// Writes every gradient.
pub(in crate::aft) fn backward<'a, T: Real>(
    problem: &Problem<'a, T>,
    geometry: Geometry,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    links: &Links<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let dims = &problem.dims;
    let Bias::Kernel { kernels, taps } = &problem.bias else { return };
    let reversed: Vec<T> = kernels.chunks_exact(*taps).flat_map(|kernel| kernel.iter().rev().copied()).collect();
    let side = |block: Block| Sides {
        queries: geometry.windows(problem, &block, false),
        keys: geometry.turned().windows(problem, &block, true),
        block,
    };
    let blocks: Vec<Sides> = Block::all(problem, BLOCK_NUMBERS).into_iter().map(side).collect();
    let sums = 2 * (header::<T>() + problem.width);
    let per_worker = (Work::<T>::len(geometry.most(), problem.width) + CHUNK.max(sums)).next_multiple_of(64);
    let workers = threads::count().max(1);
    let memory = blocks.iter().map(|sides| sides.memory(problem, &geometry)).max().unwrap_or(0).next_multiple_of(64);
    // Blocks side by side, if all threads have as many and the second cache holds what they keep; else one after the other, each on all
    // threads. The numbers are the same.
    let apart = memory <= BLOCK_ALONE && (blocks.len().is_multiple_of(workers) || blocks.len() >= 16 * workers);
    // Each head of each sequence has so many sums, whatever the number of threads.
    let planes = problem.sequences.len() * dims.heads * GROUPS;
    let kept = if apart { workers.min(blocks.len()) } else { 1 } * memory;
    let mut arena = Arena::new(scratch.take(workers * per_worker + planes * taps + kept + 128));
    let d_taps = arena.take(planes * taps);
    d_taps.fill(T::ZERO);
    let mut planes = ViewMut::strided(&mut *d_taps, [0, 0, *taps]);
    let planes = planes.shared();
    let all = arena.rest();
    let one = |index: usize, memory: &mut [T], work: &mut [T]| {
        let sides = &blocks[index];
        block(problem, &geometry, cotangent, sink, links, sides, &reversed, planes, memory, work, per_worker);
    };
    if apart {
        parallel(blocks.len(), all, memory + per_worker, |index, all| {
            let (memory, work) = all.split_at_mut(memory);
            one(index, memory, work);
        });
    } else {
        let (memory, work) = all.split_at_mut(memory);
        (0..blocks.len()).for_each(|index| one(index, memory, &mut work[..workers * per_worker]));
    }
    let add = |to: &mut [T]| {
        to.fill(T::ZERO);
        for (plane, part) in d_taps.chunks_exact(*taps).enumerate() {
            let head = plane / GROUPS % dims.heads;
            to[head * taps..][..*taps].iter_mut().zip(part).for_each(|(to, &d)| *to += d);
        }
    };
    match problem.aft.variant {
        Variant::Conv { normalized: true, .. } | Variant::Conv2d { normalized: true, .. } => {
            let mut d = vec![T::ZERO; kernels.len()];
            add(&mut d);
            reparametrized::pull_back(problem.call.parameters, *taps, &d, parameters);
        }
        _ => add(parameters[0]),
    }
}

/// Writes the gradients of one block, and adds to those of taps.
#[allow(clippy::too_many_arguments)]
fn block<'a, T: Real>(
    problem: &Problem<'a, T>,
    geometry: &Geometry,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    links: &Links<'_, T>,
    sides: &Sides,
    reversed: &[T],
    d_taps: SharedRows<'_, T>,
    memory: &mut [T],
    work: &mut [T],
    per_worker: usize,
) {
    let (dims, width) = (&problem.dims, problem.width);
    let Sides { block, queries, keys } = sides;
    let (heads, kv_heads) = (sides.heads(problem), block.heads.len());
    let mut arena = Arena::new(memory);
    let count = sides.rows(problem);
    let [x, b, d] = [(); 3].map(|()| arena.take(count));
    let rows = arena.take(count * width);
    let edge_memory = arena.take(geometry.edges_len::<T>(queries, kv_heads, 0));
    let key_memory = arena.rest();
    // The first row of each sequence, if the rows of all units stand one after the other.
    let starts: Vec<usize> = problem.sequences[block.sequences.clone()]
        .iter()
        .scan(0, |start, sequence| {
            let own = *start;
            *start += sequence.queries * heads;
            Some(own)
        })
        .collect();
    query_side(
        problem,
        geometry,
        cotangent,
        sink,
        sides,
        &starts,
        [&mut *x, b, d, rows],
        d_taps,
        edge_memory,
        work,
        per_worker,
    );

    let (x, b, d, rows): (&[T], &[T], &[T], &[T]) = (x, b, d, rows);
    let turned = geometry.turned();
    let source = |index: usize, local: usize| {
        let queries = problem.sequences[block.sequences.start + index].queries;
        let own = starts[index] + local * queries..starts[index] + (local + 1) * queries;
        RowSource {
            x: &x[own.clone()],
            b: &b[own.clone()],
            d: &d[own.clone()],
            rows: &rows[own.start * width..own.end * width],
            places: geometry.places,
        }
    };
    let edges = turned.edges(keys, heads, width, source, |_, _, _| (), key_memory, work, per_worker);

    // The initial state's mean is a key without a value that every row sees.
    let far = if links.lends() { block.sequences.len() * kv_heads } else { 0 };
    let len = header::<T>() + width;
    parallel(far, work, per_worker, |task, work| {
        let (index, own_head) = (task / kv_heads, task % kv_heads);
        let (sequence, kv_head) = (&problem.sequences[block.sequences.start + index], block.heads.start + own_head);
        let (sums, work) = work.split_at_mut(2 * len);
        let (all, own) = sums.split_at_mut(len);
        clear(all);
        for local in own_head * dims.group()..(own_head + 1) * dims.group() {
            let field = turned.field(keys[index], 0, &[]);
            let range = (0, sequence.queries as isize);
            let mut work = Work::new(&mut *work, geometry.most(), width);
            sum(&source(index, local), &field, range, &mut work, own);
            join(all, own);
        }
        if let Some(last) = links.last_item(sequence, kv_head) {
            // A mean with an exponent for each channel, all the same.
            own[..header::<T>()].fill(T::ZERO);
            (own[0], own[2]) = (last[0].max(floor()), last[3 * width]);
            own[header::<T>()..].copy_from_slice(&last[2 * width..3 * width]);
            join(all, own);
        }
        // SAFETY: every head of every sequence has one task.
        let far = unsafe { links.far_gradient(problem, sequence.batch, kv_head, 0..dims.head_dim) };
        let Some((head, numerator, denominator)) = far else { return };
        let factor = ((head.exponent[0] + all[0]) + all[1]).exp();
        for (to, &d) in numerator.iter_mut().zip(&all[header::<T>()..]) {
            *to = factor * d;
        }
        denominator[0] = -factor * all[2];
    });

    let chunks = Chunks::new(keys.clone(), kv_heads);
    parallel_chunks(chunks.tasks(), work, per_worker, |task, work| {
        let (line, own_head, chunk) = chunks.task(task);
        let (index, window) = (line / geometry.lines, &keys[line]);
        let sequence = &problem.sequences[block.sequences.start + index];
        let kv_head = block.heads.start + own_head;
        let items = KeySource::new(problem, geometry, block.sequences.start + index, kv_head).items;
        let lent = problem.lent(sequence) as isize;
        let (factors, work) = work.split_at_mut(CHUNK);
        let (from, to) = window.chunk(chunk);
        let place = |n: usize| (geometry.start(line) + from + n) as isize - lent;
        // Keys that have no more than the gradients of this call's rows.
        let tokens = if links.any() { None } else { items.tokens(place(0), to - from) };
        let next = sequence.key_start + geometry.start(line) + to;
        let end = window.outputs.min(to + CHUNK) - to;
        let ahead = [
            items.ahead(place(to - from), place(to - from + end)),
            sink.dv.ahead(sequence.batch, kv_head, next, end, dims.head_dim),
        ];
        for local in own_head * dims.group()..(own_head + 1) * dims.group() {
            let head = block.heads.start * dims.group() + local;
            let first = local == own_head * dims.group();
            let kernel = &reversed[head * kernel(problem, head).len()..];
            let field = turned.field(*window, line % geometry.lines, kernel);
            let mut work = Work::new(&mut *work, geometry.most(), width);
            let edges = edges.of(window, line, local, chunk);
            let one = walk(&source(index, local), &field, chunk, edges, &mut work, &ahead);
            let mut largest = T::ZERO;
            for (n, factor) in factors.iter_mut().enumerate().take(to - from) {
                let k = items.token(place(n)).map_or(T::NEG_INFINITY, |(key, _)| key[0]);
                *factor = (k + work.x[n]) + work.b[n];
                largest = largest.max(*factor);
            }
            // Relative to one exponent for many rows, that of a row may be above its key's.
            factors.iter_mut().for_each(|factor| *factor -= largest);
            dispatch(ExpAll { block: factors });
            if largest > T::ZERO {
                scale_by(factors, largest.exp());
            }
            if let Some(tokens) = tokens.filter(|_| one) {
                let token = [sequence.batch, kv_head, sequence.key_start + place(0) as usize];
                // SAFETY: every key belongs to one chunk of one key head, and the columns end here.
                let mut to = unsafe {
                    TokenGradients {
                        dk: sink.dk.columns(token, tokens.count, 0..1),
                        dv: sink.dv.columns(token, tokens.count, 0..dims.head_dim),
                        add: !first,
                    }
                };
                let factors = &factors[..tokens.count];
                dispatch(KeyGradients {
                    sums: work.sums,
                    width,
                    factors,
                    d: work.d,
                    values: tokens.values,
                    to: &mut to,
                });
                continue;
            }
            for (n, &factor) in factors.iter().enumerate().take(to - from) {
                let (key, at) = (place(n), (sequence.key_start as isize + place(n)) as usize);
                // SAFETY: every key belongs to one chunk of one key head, and the slices end here.
                let places = unsafe {
                    if key < 0 {
                        links.ring_row(problem, sequence.batch, kv_head, key.unsigned_abs())
                    } else {
                        let dk = sink.dk.row(sequence.batch, kv_head, at, 1);
                        Some((dk, sink.dv.row(sequence.batch, kv_head, at, dims.head_dim)))
                    }
                };
                let Some((dk, dv)) = places else { continue };
                if first {
                    dk.fill(T::ZERO);
                    dv.fill(T::ZERO);
                }
                let Some((own_key, value)) = items.token(key) else { continue };
                // A key that no row sees has gradient 0 whatever it is.
                if work.x[n] - floor() > T::ZERO {
                    let dot = dispatch(AddRowDot { sum: &work.sums[n * width..][..width], factor, v: value, dv });
                    dk[0] += factor * (dot - work.d[n]);
                }
                if let Some(last) = links.leaving(sequence, kv_head, key).filter(|_| first) {
                    let factor = (own_key[0] + last[0]).exp();
                    let dot = dispatch(AddRowDot { sum: &last[2 * width..3 * width], factor, v: value, dv });
                    dk[0] += factor * (dot - last[3 * width]);
                }
                if let Some((d_key, d_value)) = links.kept(problem, sequence, kv_head, key).filter(|_| first) {
                    dk[0] += d_key[0];
                    dv.iter_mut().zip(d_value).for_each(|(to, &d)| *to += d);
                }
            }
        }
    });
}

/// Gradients of queries, sums of those of taps, and the rows as keys see them: `[x, b, d, rows]`.
#[allow(clippy::too_many_arguments)]
fn query_side<'a, T: Real>(
    problem: &Problem<'a, T>,
    geometry: &Geometry,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    sides: &Sides,
    starts: &[usize],
    [x, b, d, rows]: [&mut [T]; 4],
    d_taps: SharedRows<'_, T>,
    memory: &mut [T],
    work: &mut [T],
    per_worker: usize,
) {
    let (dims, width) = (&problem.dims, problem.width);
    let Sides { block, queries, .. } = sides;
    let (heads, kv_heads) = (sides.heads(problem), block.heads.len());
    let source = |index: usize, head: usize| {
        KeySource::new(problem, geometry, block.sequences.start + index, block.heads.start + head)
    };
    let edges = geometry.edges(
        queries,
        kv_heads,
        0,
        source,
        |index, head, sum: &mut [T]| {
            if let Some(state) = problem.call.initial_state {
                let batch = problem.sequences[block.sequences.start + index].batch;
                let far = Head::from(state.head(batch, block.heads.start + head));
                (sum[0], sum[2]) = (far.exponent[0], far.denominator[0]);
            }
        },
        memory,
        work,
        per_worker,
    );
    let taps = kernel(problem, 0).len();
    let [mut x, mut b, mut d] = [x, b, d].map(|line| ViewMut::strided(line, [0, 0, 1]));
    let mut rows = ViewMut::strided(rows, [0, 0, width]);
    let (x, b, d) = (x.shared(), b.shared(), d.shared());
    let rows = rows.shared();
    parallel(block.sequences.len() * heads * GROUPS, work, per_worker, |task, work| {
        let (unit, group) = (task / GROUPS, task % GROUPS);
        let (index, local) = (unit / heads, unit % heads);
        let sequence = &problem.sequences[block.sequences.start + index];
        let head = block.heads.start * dims.group() + local;
        let own_head = local / dims.group();
        let own_lines = &queries[index * geometry.lines..][..geometry.lines];
        let per_line = own_lines[0].chunks();
        let count = per_line * geometry.lines;
        let kernel = kernel(problem, head);
        let plane = ((block.sequences.start + index) * dims.heads + head) * GROUPS + group;
        // SAFETY: every group of every head of every sequence has a plane of its own.
        let d_taps = unsafe { d_taps.row(0, 0, plane, taps) };
        let (c, work) = work.split_at_mut(CHUNK);
        for at in group * count / GROUPS..(group + 1) * count / GROUPS {
            let (y, chunk) = (at / per_line, at % per_line);
            let line = index * geometry.lines + y;
            let (window, items) = (&queries[line], source(index, own_head));
            let field = geometry.field(*window, y, kernel);
            let mut work = Work::new(&mut *work, geometry.most(), width);
            let one = walk(&items, &field, chunk, edges.of(window, line, own_head, chunk), &mut work, &[]);
            let (from, to) = window.chunk(chunk);
            let start = geometry.start(line);
            let rows_of = |view: &View<'a, T>| view.rows(sequence.batch, head).skip(sequence.query_start + start);
            let (q, d_out, out) = (rows_of(&problem.call.q), rows_of(&cotangent.d_out), rows_of(&cotangent.out));
            let (count, at) = (to - from, starts[index] + local * sequence.queries + start + from);
            // SAFETY: every row belongs to one chunk of one head, and slices and columns end with the chunk.
            let (mut dq, own, x, b, d) = unsafe {
                let token = sequence.query_start + start + from;
                (
                    sink.dq.columns([sequence.batch, head, token], count, 0..dims.head_dim),
                    rows.row(0, 0, at, count * width),
                    x.row(0, 0, at, count),
                    b.row(0, 0, at, count),
                    d.row(0, 0, at, count),
                )
            };
            for n in 0..count {
                let seen = work.d[n] != T::ZERO;
                (x[n], b[n]) = if seen { (-work.x[n], -work.b[n]) } else { (T::NEG_INFINITY, T::ZERO) };
                d[n] = if seen { T::ONE / work.d[n] } else { T::ZERO };
            }
            let output_rows = OutputRows {
                q: problem.aft.gate.then(|| q.skip(from)),
                d_out: d_out.skip(from),
                out: out.skip(from),
                count,
            };
            dispatch(GatedCotangents { rows: output_rows, factors: d, dq: &mut dq, items: own, sums: c });
            c[count..].fill(T::ZERO);
            d.copy_from_slice(&c[..count]);
            let skipped = (kernel.len() - field.kernel.len()).min(taps);
            if one {
                let end = window.outputs.min(to + CHUNK);
                let ahead_of = |view: &View<'a, T>| {
                    Ahead::new(rows_of(view), to as isize, end as isize, window.outputs, dims.head_dim)
                };
                let ahead = [
                    ahead_of(&problem.call.q),
                    ahead_of(&cotangent.d_out),
                    ahead_of(&cotangent.out),
                    sink.dq.ahead(sequence.batch, head, sequence.query_start + start + to, end - to, dims.head_dim),
                    items.ahead(&field, chunk + 1),
                ];
                let base = from as isize + window.shift - window.back;
                let d_taps = &mut d_taps[skipped..];
                band::add_tap_gradients(&items, &field, base, own, c, width, &mut work, d_taps, &ahead);
                continue;
            }
            let (row_items, rest) = work.sums[..CHUNK * width].split_at_mut(count * width);
            row_items.copy_from_slice(own);
            rest.fill(T::ZERO);
            add_tap_gradients(&items, &field, chunk, width, c, &mut work, &mut d_taps[skipped..]);
        }
    });
}
