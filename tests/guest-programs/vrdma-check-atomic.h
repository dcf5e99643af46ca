// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * The atomics of vrdma-check: a series whose every answer is known, then additions in competition
 * with CPUs of the server, whose sum must be exact. A part of vrdma-check.c, included there once.
 */
static uint64_t *atomic_word(struct side *s)
{
	return (uint64_t *)(s->region + GUARD);
}

static bool post_atomic(struct side *s, enum ibv_wr_opcode opcode, uint32_t slot,
			const uint64_t arg[2])
{
	struct ibv_sge sge = { .addr = (uintptr_t)(atomic_word(s) + 1 + slot), .length = 8,
			       .lkey = s->mr[0]->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1,
					.opcode = opcode, .send_flags = IBV_SEND_SIGNALED };

	wr.wr.atomic.remote_addr = s->remote.addr + GUARD;
	wr.wr.atomic.rkey = s->remote.rkey;
	wr.wr.atomic.compare_add = arg[0];
	wr.wr.atomic.swap = arg[1];
	if (!ibv_post_send(s->qp, &wr, &bad))
		return true;
	complain("ibv_post_send of an atomic failed");
	return false;
}

static bool atomic_once(struct side *s, enum ibv_wr_opcode opcode, uint64_t a, uint64_t b,
			uint64_t *before)
{
	const uint64_t arg[2] = { a, b };
	struct ibv_wc wc;

	if (!post_atomic(s, opcode, 0, arg) || !wait_wc(s, &wc))
		return false;
	*before = atomic_word(s)[1];
	return true;
}

/* The word through a known series of values; every answer is the value before. */
static bool atomic_series(struct side *s, uint64_t word, uint32_t count)
{
	uint64_t before = 0;
	uint32_t i;

	for (i = 0; i < count; i++) {
		uint64_t add = mix(i), expect = word;
		bool ok;

		if (i % 3 == 0) {
			ok = atomic_once(s, IBV_WR_ATOMIC_FETCH_AND_ADD, add, 0, &before);
			word += add;
		} else {
			/* Every second compare fails and must change nothing. */
			ok = atomic_once(s, IBV_WR_ATOMIC_CMP_AND_SWP, i % 3 == 1 ? word : word + 1,
					 add, &before);
			word = i % 3 == 1 ? add : word;
		}
		if (!ok || before != expect) {
			complain("atomic %u returned %016llx instead of %016llx", i,
				 (unsigned long long)before, (unsigned long long)expect);
			return false;
		}
	}
	return atomic_once(s, IBV_WR_ATOMIC_CMP_AND_SWP, word, 0, &before) && before == word;
}

/*
 * Adds 1 `count` times, WINDOW at a time, while CPUs of the server add to the same word: no answer
 * may come twice.
 */
static bool atomic_contend(struct side *s, uint32_t count)
{
	const uint64_t arg[2] = { 1, 0 };
	uint32_t posted = 0, done = 0;
	uint64_t last = 0;
	struct ibv_wc wc;

	for (; posted < WINDOW && posted < count; posted++)
		if (!post_atomic(s, IBV_WR_ATOMIC_FETCH_AND_ADD, posted, arg))
			return false;
	for (; done < count; done++) {
		uint64_t before;

		if (!wait_wc(s, &wc) || wc.wr_id >= WINDOW)
			return false;
		before = atomic_word(s)[1 + wc.wr_id];
		if (done && before <= last) {
			complain("FETCH_ADD returned %llu after %llu", (unsigned long long)before,
				 (unsigned long long)last);
			return false;
		}
		last = before;
		if (posted < count &&
		    !post_atomic(s, IBV_WR_ATOMIC_FETCH_AND_ADD, (uint32_t)wc.wr_id, arg))
			return false;
		posted += posted < count;
	}
	return true;
}

static volatile bool adders_stop;

/* Returns how often it added, as a pointer. */
static void *adder(void *word)
{
	uint64_t n = 0;

	while (!adders_stop) {
		__atomic_fetch_add((uint64_t *)word, 1, __ATOMIC_SEQ_CST);
		n++;
	}
	return (void *)(uintptr_t)n;
}

static bool client_atomic(struct side *s, const struct step *step)
{
	bool ok, verdict;

	memset(s->region, 0, 2 * GUARD);
	put(s, step, sizeof(*step));
	get_bool(s);
	ok = atomic_series(s, step->seed, step->count);
	put_bool(s, ok);
	if (get_bool(s))
		ok = atomic_contend(s, CONTEND * step->count);
	put_bool(s, ok);
	verdict = get_bool(s);
	return ok && verdict;
}

/* Sums up what the threads added. */
static bool stop_adders(const pthread_t *thread, uint32_t threads, uint64_t *sum)
{
	bool ok = true;
	uint32_t i;

	adders_stop = true;
	for (i = 0; i < threads; i++) {
		void *added;

		pthread_join(thread[i], &added);
		*sum += (uintptr_t)added;
		ok = ok && added;
	}
	return ok;
}

static void start_adders(struct side *s, pthread_t *thread, uint32_t threads)
{
	uint32_t i;

	adders_stop = false;
	for (i = 0; i < threads; i++)
		if (pthread_create(&thread[i], NULL, adder, atomic_word(s)))
			die("pthread_create");
	/* The word is 0 after the series: once it is not, a thread runs. */
	while (threads && !*(volatile uint64_t *)atomic_word(s))
		;
}

/* The word must end as the exact sum, and its neighbours as they were. */
static bool server_atomic(struct side *s, const struct step *step)
{
	struct layout l = make_layout(8, 0, step->seed, 1);
	uint64_t sum = CONTEND * step->count;
	pthread_t thread[MAX_THREADS];
	uint32_t threads;
	bool ok;

	place_background(s->region, &l, step->seed);
	*atomic_word(s) = step->seed;
	memcpy(s->image, s->region, l.span);
	put_bool(s, true);
	threads = s->plan.threads;
	ok = get_bool(s) && !*atomic_word(s);
	if (!ok)
		threads = 0;
	start_adders(s, thread, threads);
	put_bool(s, ok);
	ok = get_bool(s) && ok;
	ok = stop_adders(thread, threads, &sum) && ok;
	if (ok && *atomic_word(s) != sum)
		complain("the word is %llu, the sum of all additions %llu",
			 (unsigned long long)*atomic_word(s), (unsigned long long)sum);
	*(uint64_t *)(s->image + GUARD) = sum;
	ok = ok && check_image(s, &l, "atomic");
	put_bool(s, ok);
	return ok;
}
