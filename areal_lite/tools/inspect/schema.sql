-- The index of one run's dumps (dump_index.py). columns are those of episode_row.py. weight is 1 over the number of
-- lines of the episode that have a reward, null in lines without one.

CREATE TABLE folders(path TEXT PRIMARY KEY, mtime INTEGER, unfinished INTEGER);
CREATE TABLE files(id INTEGER PRIMARY KEY, path TEXT UNIQUE, folder TEXT, size INTEGER, mtime INTEGER, inode INTEGER,
    indexed INTEGER, lines INTEGER, guard INTEGER);
CREATE INDEX files_folder ON files(folder);
CREATE TABLE episodes(id INTEGER PRIMARY KEY AUTOINCREMENT, {columns},
    line INTEGER, offset INTEGER, length INTEGER, weight REAL, file INTEGER REFERENCES files ON DELETE CASCADE);
CREATE INDEX episodes_order ON episodes(version, task, sample, scope);
CREATE INDEX episodes_file ON episodes(file, line);
CREATE TABLE problems(file INTEGER REFERENCES files ON DELETE CASCADE, line INTEGER, offset INTEGER, kind TEXT,
    message TEXT);
CREATE INDEX problems_file ON problems(file);
CREATE TABLE facts(step INTEGER PRIMARY KEY, mtime INTEGER);
