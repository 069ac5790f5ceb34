# The commands to know. Each sets up what it needs in .venv; `make` alone prints this list.
#
#   make demo        five thousand rotated digits: a table and a picture
#   make check       format, lint, types and import layers; changes nothing
#   make test        make check, then every test with coverage: what must pass before a change lands
#   make test-fast   the product's tests without the slow ones, for the inner loop: under a minute on two cores
#   make fuzz        damaged and forged files, 200 times as many as in make test; FUZZ=1000 for 1000 times
#   make serve       a service with drawn pictures to look at, at http://127.0.0.1:8080; Ctrl-C ends it
#   make browser     Chromium for the tests of the page, if it is not there and may be installed; make test does it
#   make docs        the documentation as a web site in site/, which loads nothing from other hosts
#   make bench       the bank compared with faiss, hnswlib, scikit-learn and the published code
#   make bench-scale the progressive search beside others, up to the rows of ImageNet: sizes not yet in results/scale
#   make bench-serve the service under load, beside the same without a disk and a bare echo; a quarter of an hour
#   make clean       removes .venv and everything that was built

.PHONY: help demo serve check test test-fast fuzz docs bench bench-scale bench-serve clean browser
PYTHON ?= python3
FUZZ ?= 200
PORT ?= 8080
BIN := .venv/bin
# Python compiles a module when it is first imported: to compile all 18,000 of them here takes half a minute, and most are
# never imported.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# What test-fast runs, and what it leaves out of that: tests of a second or more, which start processes, kill them, or
# fill memory. Measured with --durations; a test of these lists fails if one of the names is gone.
FAST := tests/core tests/index tests/store tests/models \
	tests/test_estimator.py tests/test_files.py tests/test_losses.py tests/test_require.py
SLOW := tests/core/test_classifier.py::test_batch_size_never_changes_an_answer \
	tests/core/test_classifier.py::test_answers_are_those_of_the_oracle \
	tests/index/test_exact.py::test_a_forked_process_can_search_too \
	tests/models/test_stream.py::test_keys_of_a_shuffling_loader_are_rows_of_its_data_set \
	tests/store/test_file.py::test_the_limit_of_texts_is_what_the_library_reads \
	tests/store/test_file.py::test_two_writing_processes_and_a_reader \
	tests/store/test_file.py::test_memory_stays_within_twice_the_bank \
	tests/store/test_file.py::test_killed_at_random_moments \
	tests/store/test_file.py::test_killed_before_every_line_of_the_replacement \
	tests/store/test_sqlite.py::test_a_second_writer_is_refused_in_one_sentence \
	tests/store/test_durable.py::test_a_log_that_cannot_be_written_changes_nothing_and_reads_go_on \
	tests/test_files.py::test_what_was_added_is_read_back_and_a_line_cut_off_by_a_crash_hides_no_other \
	tests/test_files.py::test_a_lock_is_held_against_other_processes_until_they_are_killed

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

demo: .venv/ready
	$(BIN)/adanpc demo

serve: .venv/ready
	$(BIN)/adanpc sample adanpc-sample --port $(PORT)

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check browser
	$(BIN)/pytest -n auto --dist worksteal --cov --cov-report=term
	$(BIN)/coverage report --include='src/adanpc/core/*,src/adanpc/index/*,src/adanpc/store/*' --fail-under=100

# The tests of the page need Chromium. Without it, and without the right to install it, they are skipped and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
		(test "$$(id -u)" = 0 && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium) || \
		echo "Chromium is not here and cannot be installed: the tests of the page will be skipped."

test-fast: .venv/ready
	$(BIN)/pytest -q -n auto --dist worksteal $(FAST) $(addprefix --deselect=,$(SLOW))

fuzz: .venv/ready
	ADANPC_FUZZ=$(FUZZ) $(BIN)/pytest -n auto --dist worksteal tests/attacks

# The pages must work where there is no network, so a tag or a style sheet that loads from another host is an error.
# No --quiet: it drops the warnings that --strict counts.
docs: .venv/ready
	$(INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@! grep -rnoE --include='*.html' '<(script|link|img|iframe|source|object)[^>]* (src|href|data)=.?(https?:)?//[^> ]*' site
	@! grep -rnoE --include='*.css' '(url\(.?|@import .?)(https?:)?//[^) ]*' site
	@echo "The documentation is in site/index.html; to search in it: $(BIN)/python -m http.server --directory site"

bench: .venv/ready
	$(INSTALL) --editable '.[bench]'
	$(BIN)/python -m benchmarks.core

bench-scale: .venv/ready
	$(INSTALL) --editable '.[bench]'
	$(BIN)/python -m benchmarks.scale

bench-serve: .venv/ready
	$(BIN)/python -m benchmarks.serve

# torch comes first and pinned, and timm and torchvision without what they ask for, so that nothing pulls another build
# of torch.
.venv/ready: pyproject.toml constraints.txt setup.py src/adanpc/index/_kernels.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		(echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" && false)
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[fast,vision,dev]'
	$(INSTALL) --no-deps timm torchvision
	touch $@

clean:
	rm -rf .venv adanpc-sample build dist site .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
